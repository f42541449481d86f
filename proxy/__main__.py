"""The command `sandbox-proxy`: its options and its subcommands."""

import argparse
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from socket import socket

    from starlette.applications import Starlette

    from proxy.agent.model import Model
    from proxy.api.dependencies import Services
    from proxy.config import Config
    from sandbox_runtime.backends.base import Backend
    from sandbox_runtime.pool.pool import Pool

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - of argparse's API


GC_THRESHOLDS = (3_000, 5, 2)
"""The thresholds of Python's garbage collector in the server. Python's default for the first, 700,
costs a run 6 % of its processor time. The second and the third are below Python's defaults, so that
full collections stay as frequent and memory does not grow."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)

    from proxy.config import ConfigError
    from sandbox_runtime.errors import SandboxStartError

    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except (ConfigError, SandboxStartError) as error:
        print(f"sandbox-proxy: {error}", file=sys.stderr)  # noqa: T201 - the output of the command
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-proxy",
        description="An OpenAI-compatible proxy that gives any language model a sandbox.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, help_text in (
        ("serve", serve, "start the server"),
        ("run", answer_prompt, "answer one prompt with files, on a temporary or a running proxy"),
        ("demo", demo, "answer one request from end to end, with a script in place of a model"),
        ("doctor", doctor, "check the model backend, the engine, the image and the isolation"),
        ("gc", gc, "remove the sandboxes of proxies that have crashed"),
        ("profiles", print_profiles, "print the settings of each profile as Markdown"),
        ("build-image", build_image, "build the image of Docker sandboxes"),
        ("build-rootfs", build_rootfs, "build a root file system for bubblewrap, without Docker"),
    ):
        _add_command(commands, name, run, help_text)
    help_text = "verify that no audit log was changed, truncated or removed"
    actions = _add_group(commands, "audit", help_text)
    _add_command(actions, "verify", verify_audit_logs, help_text)
    actions = _add_group(commands, "cluster", "check a Kubernetes cluster")
    help_text = "check rights, network, a sandbox in a Pod and its isolation, without a model"
    _add_command(actions, "smoke", smoke_test_cluster, help_text)
    actions = _add_group(commands, "config", "check or print the configuration")
    help_text = (
        "check the settings of file, environment and command line, and the secrets they name"
    )
    _add_command(actions, "check", check_config, help_text)
    help_text = "print all settings as YAML, defaults included; secrets are never printed"
    _add_command(actions, "show", show_config, help_text)
    help_text = "print the JSON schema of config.yaml"
    schema = actions.add_parser("schema", help=help_text, description=help_text)
    schema.set_defaults(run=print_schema)
    return parser


class _PrintVersion(argparse.Action):
    """The action of `--version`: prints the version and exits. argparse's own action would look up
    the version at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"sandbox-proxy {version('llm-sandbox-proxy')}\n")
        parser.exit()


def _add_group(commands: "_Commands", name: str, help_text: str) -> "_Commands":
    """Add a command with actions of its own, such as `audit`. Return the group to which the actions
    are added."""
    group = commands.add_parser(name, help=help_text, description=help_text)
    return group.add_subparsers(required=True, metavar="action")


def _add_command(
    commands: "_Commands", name: str, run: Callable[[argparse.Namespace], int], help_text: str
) -> None:
    command = commands.add_parser(name, help=help_text, description=help_text)
    command.set_defaults(run=run)
    command.add_argument("--config", type=Path, help="a config.yaml")
    command.add_argument("--backend-url", help="URL of the OpenAI-compatible server, up to /v1")
    command.add_argument(
        "--backend-key-env",
        metavar="NAME",
        help="environment variable with the server's key; default: OPENAI_API_KEY for OpenAI",
    )
    if name == "smoke":
        command.set_defaults(sandbox="kubernetes")
    else:
        command.add_argument(
            "--sandbox",
            choices=["auto", "docker", "bubblewrap", "kubernetes"],
            help="the sandbox backend",
        )
    if name in ("serve", "check", "show"):
        _add_server_options(command)
    if name in ("serve", "check", "show", "doctor"):
        command.add_argument(
            "--allow-weak",
            action="store_true",
            default=None,
            help="bubblewrap: start sandboxes without a cgroup, which limits memory and processes",
        )
    _add_options(name, command)


def _add_server_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", help="address to listen on")
    command.add_argument("--port", type=int, help="port to listen on; 0: a free port")
    command.add_argument(
        "--allow-open",
        action="store_true",
        default=None,
        help="serve without keys on an address that other machines can reach",
    )
    command.add_argument(
        "--profile", help="profile of requests for which neither request, model nor key names one"
    )
    command.add_argument(
        "--network",
        choices=["none", "allowlist", "open"],
        help="network of the sandboxes of all profiles that have no network mode of their own",
    )


def _add_options(name: str, command: argparse.ArgumentParser) -> None:
    """Add the options of the command `name` that most other commands do not have."""
    if name in ("doctor", "smoke"):
        command.add_argument(
            "--self-test", action="store_true", help="try every known escape from the sandbox"
        )
    if name == "verify":
        command.add_argument("names", nargs="*", help="run ids or files; default: all logs")
        command.add_argument(
            "--data-dir", type=Path, help="directory of stored data; default: server.data_dir"
        )
        command.add_argument("--state-dir", type=Path, help=argparse.SUPPRESS)  # deprecated
    if name == "build-image":
        command.add_argument("--target", choices=["full", "slim"], default="full")
        command.add_argument("--tag", help="default: sandbox.docker.image")
        command.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    if name == "build-rootfs":
        command.add_argument("tar", type=Path, help="file to write, for sandbox.bubblewrap.rootfs")
    if name == "run":
        _add_run_options(command)
    if name == "demo":
        command.add_argument("question", nargs="?", help="requires --backend-url and --model")
        command.add_argument("--model", help="one of the backend's models; default: a script")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "The answer is printed to stdout, the steps to stderr. Exit codes: 0: there is an answer;"
        " 1: an error, or no answer; 2: wrong options; 130: interrupted."
    )
    command.add_argument("prompt")
    command.add_argument("--model", help="default: the proxy's first model")
    command.add_argument(
        "--input-dir", type=Path, help="directory of files for the sandbox, with no subdirectories"
    )
    command.add_argument(
        "--output-dir",
        type=Path,
        help="directory for the produced files (files/) and the trajectory (trajectory.json)",
    )
    command.add_argument("--profile", help="the profile of the request, such as paper")
    command.add_argument(
        "--trajectory-format",
        choices=["native", "openai", "reference"],  # the type's module takes 20 ms to import
        default="native",
        help="default: native",
    )
    command.add_argument(
        "--base-url", help="URL of a running proxy, up to /v1; default: start one for the command"
    )
    command.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the running proxy's key"
    )


def _config(arguments: argparse.Namespace) -> "Config":
    """Return the configuration; options of the command line take precedence. Raises ConfigError."""
    from proxy.config import load

    options = (
        ("server", "host", getattr(arguments, "host", None)),
        ("server", "port", getattr(arguments, "port", None)),
        ("server", "allow_open", getattr(arguments, "allow_open", None)),
        ("backend", "base_url", arguments.backend_url),
        ("backend", "provider", "openai" if arguments.backend_url else None),
        ("backend", "api_key_env", arguments.backend_key_env),
        ("sandbox", "backend", arguments.sandbox),
    )
    tree: dict[str, Any] = {}
    for section, key, value in options:
        if value is not None:
            tree.setdefault(section, {})[key] = value
    if getattr(arguments, "allow_weak", None):
        tree.setdefault("sandbox", {})["bubblewrap"] = {"allow_weak": True}
    if profile := getattr(arguments, "profile", None):
        tree["profile"] = profile
    mode = getattr(arguments, "network", None)
    if mode:
        tree["isolation"] = {"network": {"mode": mode}}
        if mode != "allowlist":  # allowed hosts of the file would be an error
            tree["isolation"]["network"]["allowed_hosts"] = []
    config = load(arguments.config, tree)
    if mode:
        _require_network_mode(config, mode)
    return config


def _require_network_mode(config: "Config", mode: str) -> None:
    """Raise ConfigError if the default profile has another network mode than `--network`."""
    from proxy.config import ConfigError
    from proxy.profiles import build_profiles

    profile = build_profiles(config).default
    if profile.isolation.network.mode != mode:
        raise ConfigError(
            f"--network {mode}: the profile {profile.name} sets isolation.network.mode:"
            f" {profile.isolation.network.mode}. Choose another profile, or define one in profiles"
        )


def serve(arguments: argparse.Namespace) -> int:
    """Run the server until it is interrupted."""
    import asyncio
    import gc
    import logging

    # The objects that the imports create are not garbage. Collections that visit them took a
    # seventh of the processor time of the start. `_serve` enables the collector again.
    gc.disable()
    from proxy.bootstrap import build_backend, build_model, require_keys

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = _config(arguments)
    with listen(config.server.host, config.server.port) as listener:
        require_keys(config, listener.getsockname()[0])
        asyncio.run(_serve(config, build_model(config), build_backend(config), listener))
    return 0


def listen(host: str, port: int) -> "socket":
    """Return a listening TCP socket. Raises ConfigError."""
    import socket

    from proxy.config import ConfigError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without an explicit protocol, as in socket.create_server, asyncio does not recognize TCP and
    # leaves Nagle's algorithm on, which costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


async def _serve(config: "Config", model: "Model", backend: "Backend", listener: "socket") -> None:
    import gc
    import os
    import resource

    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    from proxy.app import create_app
    from proxy.bootstrap import build_services
    from proxy.doctor import check_model, log_startup_summary, require_working_backend
    from proxy.http_server import ConnectionRegistry, HTTPServer, connection_limit, is_loopback
    from proxy.profiles import build_profiles
    from sandbox_runtime.clock import SystemClock

    profiles = build_profiles(config)
    software = await require_working_backend(
        backend, profiles.default.isolation, self_test=config.sandbox.self_test
    )
    services, pool = build_services(config, model, backend, listener, software)
    check = await check_model(model, _key_refusal_reason(config), services.runs.agent.windows)
    used = [name for key in config.keys for name in key.profiles]
    used += [model.profile for model in config.models.values() if model.profile]
    others = {name: profiles.by_name[name].isolation.network for name in used}
    log_startup_summary(listener, backend.name, check, profiles.default.isolation.network, others)
    app = create_app(services, _lifespan(services, pool, backend))
    # Existing objects live as long as the server. Collecting them took 0.08 s each time, a fifth of
    # the processor time of plain requests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = connection_limit(config.server.max_connections, files)
    # Reverse proxies whose X-Forwarded-For uvicorn trusts have many clients each.
    trusted = os.environ.get("FORWARDED_ALLOW_IPS", "")
    trusted_proxies = ProxyHeadersMiddleware(app, trusted).trusted_hosts  # type: ignore[arg-type]  # ASGI
    connections = ConnectionRegistry(
        max_connections,
        SystemClock(),
        lambda address: is_loopback(address) or address in trusted_proxies,
    )
    server = HTTPServer(app, services.runs, connections, config.server.drain_s)
    await server.serve(sockets=[listener])


def _lifespan(
    services: "Services", pool: "Pool", backend: "Backend"
) -> "Callable[[Starlette], AbstractAsyncContextManager[None]]":
    import asyncio

    from sandbox_runtime.backends.base import sweep_forever
    from sandbox_runtime.clock import SystemClock

    @asynccontextmanager
    async def lifespan(app: "Starlette") -> AsyncIterator[None]:
        sweeping = [
            asyncio.create_task(work)
            for work in (sweep_forever(backend, SystemClock()), services.store.sweep_forever())
        ]
        services.runs.listen()
        loop = asyncio.get_running_loop()
        services.store.call_when_found_dead(
            lambda: loop.call_soon_threadsafe(services.runs.cancel_all_as_lost)
        )
        pool.start()
        await services.tool_verdicts.load()
        yield
        for task in sweeping:
            task.cancel()
        await asyncio.wait(sweeping)
        await services.runs.aclose()
        await services.tool_verdicts.aclose()
        await services.workspaces.aclose()
        await pool.aclose()
        await backend.aclose()
        await services.model.aclose()
        services.store.close()

    return lifespan


def doctor(arguments: argparse.Namespace) -> int:
    """Check the model backend and the sandboxes, and print the results. Return 1 if a check that
    `serve` requires has failed, else 0."""
    import asyncio

    from proxy.bootstrap import build_model, build_tool_probe, tool_support_settings
    from proxy.doctor import diagnose
    from proxy.profiles import build_profiles

    config = _config(arguments)
    model = build_model(config)
    return asyncio.run(
        diagnose(
            model,
            _key_refusal_reason(config),
            build_tool_probe(config, model),
            tool_support_settings(config),
            _backend_builders(config, needs_image=True),
            build_profiles(config).default.isolation,
            self_test=arguments.self_test,
        )
    )


def smoke_test_cluster(arguments: argparse.Namespace) -> int:
    """Check the cluster and print the results. Return 1 if the cluster cannot run sandboxes, else
    0."""
    import asyncio

    from proxy import doctor
    from proxy.bootstrap import build_kubernetes
    from proxy.profiles import build_profiles

    config = _config(arguments)
    return asyncio.run(
        doctor.smoke_test_cluster(
            partial(build_kubernetes, config),
            build_profiles(config).default.isolation,
            self_test=arguments.self_test,
        )
    )


def check_config(arguments: argparse.Namespace) -> int:
    """Check the configuration without starting anything. Raises ConfigError."""
    from proxy.bootstrap import require_valid

    require_valid(_config(arguments))
    print(f"{arguments.config or 'configuration'}: ok")  # noqa: T201 - the output of the command
    return 0


def show_config(arguments: argparse.Namespace) -> int:
    """Print all settings as a YAML file for `--config`. Passwords in URLs are masked."""
    import yaml

    tree = _config(arguments).model_dump(mode="json")
    urls = [(tree["server"], "public_url"), (tree["backend"], "base_url")]
    urls += [(tree["store"], "database_url"), (tree["sandbox"]["docker"], "host")]
    for section, name in urls:
        if section[name] is not None:
            section[name] = re.sub(r"://[^/?#]*@", "://***@", section[name])
    sys.stdout.write(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100))
    return 0


def print_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON schema of config.yaml."""
    import json

    from proxy.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))  # noqa: T201 - the output of the command
    return 0


def print_profiles(arguments: argparse.Namespace) -> int:
    """Print all profiles as Markdown."""
    from proxy.profiles import build_profiles, profile_table

    built = build_profiles(_config(arguments))
    about = [f"**{name}**: {profile.about}\n" for name, profile in built.by_name.items()]
    table = profile_table(built.by_name, built.default)
    sys.stdout.writelines(f"{line}\n" for line in (*about, *table))
    return 0


def gc(arguments: argparse.Namespace) -> int:
    """Remove the sandboxes of crashed proxies from every backend that is available."""
    import asyncio

    from proxy.doctor import collect_garbage

    return asyncio.run(collect_garbage(_backend_builders(_config(arguments), needs_image=False)))


def verify_audit_logs(arguments: argparse.Namespace) -> int:
    """Verify the audit logs and print each finding. Return 1 if a log was changed, truncated or
    removed, is not in the index, or is named as an argument but does not exist. An unfinished
    log is no fault."""
    import logging

    from proxy.audit.audit_log import verify
    from proxy.bootstrap import audit_dir, audit_key
    from proxy.config import ConfigError, data_dir

    config = _config(arguments)
    if arguments.state_dir:
        if arguments.data_dir:
            raise ConfigError("--state-dir and --data-dir are the same option: remove --state-dir")
        logging.warning("--state-dir is deprecated: write --data-dir")
    root = audit_dir(arguments.data_dir or arguments.state_dir or data_dir(config))
    found = verify(root, audit_key(config), arguments.names, config.audit.retention_days)
    is_wrong = False
    for finding in found:
        print(finding)  # noqa: T201 - the output of the command
        is_wrong |= finding.state == "WRONG"
    return int(is_wrong)


def build_image(arguments: argparse.Namespace) -> int:
    """Build the image of Docker sandboxes with the `docker` command."""
    from sandbox_runtime.images import build_image

    tag = arguments.tag or _config(arguments).sandbox.docker.image
    options = [f"--build-arg={each}" for each in arguments.build_arg]
    return build_image(arguments.target, tag, *options)


def build_rootfs(arguments: argparse.Namespace) -> int:
    """Build a root file system with mmdebstrap."""
    from sandbox_runtime.images import build_rootfs

    return build_rootfs(arguments.tar)


def _key_refusal_reason(config: "Config") -> str:
    """Return the text that `doctor` prints if the backend refuses a call for its key. The text says
    where the key comes from, or that none is sent."""
    from proxy.config import backend_key_variable
    from proxy.doctor import CLIENT_KEY_REQUIRED

    if config.backend.forward_client_key:
        return CLIENT_KEY_REQUIRED
    if variable := backend_key_variable(config.backend):
        return f"it refuses the key in the environment variable {variable}"
    return (
        "it requires a key, and none is sent: name the environment variable with the key in"
        " --backend-key-env or backend.api_key_env"
    )


def _backend_builders(config: "Config", *, needs_image: bool) -> "dict[str, Callable[[], Backend]]":
    """Return a builder for each sandbox backend that the configuration allows, in the order in
    which `build_backend` tries them. With `needs_image`, the builder of the Docker backend fails if
    the image is missing and another backend can be used instead."""
    from proxy.bootstrap import build_bubblewrap, build_docker, build_kubernetes, engine_setting

    setting = config.sandbox.backend
    if setting == "kubernetes":
        return {"kubernetes": partial(build_kubernetes, config)}
    may_fall_back = setting == "auto" and not engine_setting(config)
    found: dict[str, Callable[[], Backend]] = {}
    if setting != "bubblewrap":
        found["docker"] = partial(build_docker, config, needs_image=needs_image and may_fall_back)
    if setting == "bubblewrap" or may_fall_back:
        found["bubblewrap"] = partial(build_bubblewrap, config)
    return found


def demo(arguments: argparse.Namespace) -> int:
    """Start a temporary server, send it one request and print the answer."""
    import asyncio
    import tempfile

    from proxy.bootstrap import build_backend, build_model, build_services
    from proxy.config import ConfigError, parse
    from proxy.demo import SCRIPT, run_demo

    if arguments.question and not (arguments.backend_url and arguments.model):
        raise ConfigError(
            "the script answers only its own question: to ask another, give --backend-url and"
            " --model"
        )
    config = _config(arguments)
    with tempfile.TemporaryDirectory(prefix="sandbox-demo-") as directory:
        tree = config.model_dump()
        tree["server"]["data_dir"] = directory
        tree["sandbox"]["backend"] = arguments.sandbox or "bubblewrap"
        if not arguments.backend_url:
            tree["backend"] |= {
                "provider": "scripted",
                "script": SCRIPT,
                "forward_client_key": False,
            }
        config = parse(tree, "demo")
        model, backend = build_model(config), build_backend(config)
        services, pool = build_services(config, model, backend)
        lifespan = _lifespan(services, pool, backend)
        return asyncio.run(run_demo(services, lifespan, arguments.question, arguments.model))


def answer_prompt(arguments: argparse.Namespace) -> int:
    """Send one prompt to a temporary or a running server, and print the answer."""
    import asyncio
    import tempfile

    from proxy.bootstrap import build_backend, build_model, build_services
    from proxy.command_client import (
        RunOptions,
        create_output_dir,
        input_files,
        run_prompt,
        run_with_temporary_server,
    )
    from proxy.config import ConfigError, parse, read_secret

    options = RunOptions(
        arguments.prompt,
        arguments.model,
        input_files(arguments.input_dir),
        arguments.output_dir,
        arguments.trajectory_format,
    )
    if arguments.base_url:
        own = ("config", "backend_url", "backend_key_env", "sandbox")
        if given := [name for name in own if getattr(arguments, name)]:
            option = given[0].replace("_", "-")
            raise ConfigError(f"--{option}: the proxy of --base-url has its own configuration")
        key = read_secret(arguments.api_key_env) or "none"
        create_output_dir(options.output_dir)
        return asyncio.run(run_prompt(arguments.base_url, key, options, arguments.profile))
    if arguments.api_key_env:
        raise ConfigError("--api-key-env: give --base-url too, or --backend-key-env for the model")
    config = _config(arguments)
    create_output_dir(options.output_dir)
    with tempfile.TemporaryDirectory(prefix="sandbox-run-") as directory:
        tree = config.model_dump()
        # The command is the only client, and takes all content for the answer.
        tree["server"] |= {"data_dir": directory, "narration": "reasoning"}
        tree["keys"], tree["backend"]["forward_client_key"] = [], False
        config = parse(tree, "run")
        model, backend = build_model(config), build_backend(config)
        services, pool = build_services(config, model, backend)
        lifespan = _lifespan(services, pool, backend)
        return asyncio.run(run_with_temporary_server(services, lifespan, options))


if __name__ == "__main__":
    sys.exit(main())
