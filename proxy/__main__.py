"""The command line: the only place that names concrete classes and joins them."""

import argparse
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from socket import socket

    from fastapi import FastAPI

    from proxy.agent.model import Model
    from proxy.config import Config
    from proxy.services import Services
    from sandbox_runtime.backends.base import Backend
    from sandbox_runtime.egress.dialer import Endpoint
    from sandbox_runtime.pool.pool import Pool
    from sandbox_runtime.way_out import WayOut

FILES_SWEEP_S = 600


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)

    from proxy.config import ConfigError
    from sandbox_runtime.errors import SandboxStartError

    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except (ConfigError, SandboxStartError) as error:
        print(f"sandbox-proxy: {error}", file=sys.stderr)  # noqa: T201 - the command's own voice
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-proxy",
        description="An OpenAI-compatible proxy that gives any language model a computer.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, words in (
        ("serve", serve, "serve clients"),
        ("demo", demo, "one request from end to end, on a script instead of a model"),
        ("doctor", doctor, "check backend, engine, image and isolation"),
        ("gc", gc, "remove sandboxes that dead proxies have left behind"),
        ("build-image", build_image, "build the image that Docker's sandboxes start from"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.set_defaults(run=run)
        command.add_argument("--config", type=Path, help="a config.yaml; default: its defaults")
        command.add_argument("--backend-url", help="the OpenAI-compatible server, up to /v1")
        command.add_argument("--sandbox", choices=["auto", "docker", "bubblewrap"])
        if name == "serve":
            command.add_argument("--host", help="address to listen on")
            command.add_argument("--port", type=int, help="port to listen on; 0: a free one")
        if name == "doctor":
            command.add_argument("--self-test", action="store_true", help="try to escape, all ways")
        if name == "build-image":
            command.add_argument("--target", choices=["full", "slim"], default="full")
            command.add_argument("--tag", help="default: as configured")
        if name == "demo":
            command.add_argument("question", nargs="?", help="needs --backend-url and --model")
            command.add_argument("--model", help="the backend's model; default: a script")
    return parser


def _config(arguments: argparse.Namespace) -> "Config":
    """The file, with what the command line says put over it."""
    from proxy.config import load, parse

    tree = load(arguments.config).model_dump()
    for section, key, value in (
        ("server", "host", getattr(arguments, "host", None)),
        ("server", "port", getattr(arguments, "port", None)),
        ("backend", "base_url", arguments.backend_url),
        ("sandbox", "backend", arguments.sandbox),
    ):
        if value is not None:
            tree[section][key] = value
    if arguments.backend_url:
        tree["backend"]["kind"] = "openai"
    return parse(tree, "command line")


def build_model(config: "Config") -> "Model":
    """The door to the language model. Raises ConfigError."""
    from proxy.config import ConfigError, secret
    from proxy.models.litellm_model import LiteLLMModel
    from proxy.models.openai_http import OpenAIHTTPModel
    from proxy.models.retry import RetryingModel
    from proxy.models.scripted import ScriptedModel

    backend = config.backend
    key = secret(backend.api_key_env)
    if backend.kind == "scripted":
        if backend.script is None:
            raise ConfigError("backend.script: name the YAML file to play")
        try:
            return ScriptedModel.from_yaml(backend.script)
        except (OSError, ValueError) as error:
            raise ConfigError(f"backend.script: {error}") from error
    model: Model
    if backend.kind == "litellm":
        model = LiteLLMModel(
            backend.models, timeout_s=backend.timeout_s, api_key=key, api_base=backend.base_url
        )
    elif backend.base_url is None:
        raise ConfigError("backend.base_url: name the OpenAI-compatible server, up to /v1")
    else:
        model = OpenAIHTTPModel(backend.base_url, api_key=key, timeout_s=backend.timeout_s)
    return RetryingModel(model, attempts=backend.attempts)


def _state_dir(config: "Config") -> Path:
    """The place for files and locks, made if it is not there. Raises ConfigError."""
    from proxy.config import ConfigError, state_dir

    directory = state_dir(config)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"server.state_dir: {error}") from error
    return directory


def build_backend(config: "Config") -> "Backend":
    """The place for sandboxes. Raises ConfigError, and SandboxStartError where none can be had."""
    from sandbox_runtime.errors import SandboxStartError

    sandbox = config.sandbox
    state = _state_dir(config)
    if sandbox.backend in ("auto", "docker"):
        from sandbox_runtime.backends.docker import DockerBackend

        try:
            return DockerBackend(
                sandbox.docker.image,
                state_dir=state,
                runtime=sandbox.docker.runtime,
                host=sandbox.docker.host,
                inputs=sandbox.inputs,
                agent=sandbox.agent,
            )
        except SandboxStartError:
            if sandbox.backend == "docker":
                raise
    from sandbox_runtime.backends.bubblewrap import BubblewrapBackend

    bubblewrap = sandbox.bubblewrap
    return BubblewrapBackend(
        rootfs=bubblewrap.rootfs,
        uid=bubblewrap.uid,
        state_dir=state,
        inputs=sandbox.inputs,
        agent=sandbox.agent,
    )


def build_services(
    config: "Config", model: "Model", backend: "Backend", listener: "socket | None" = None
) -> tuple["Services", "Pool", "WayOut"]:
    """The house, joined. Raises ConfigError."""
    from proxy.agent.agent import Agent
    from proxy.config import ConfigError, secret
    from proxy.files import FileStore
    from proxy.services import Services
    from sandbox_runtime.pool.pool import Pool
    from sandbox_runtime.tools import make_tools
    from sandbox_runtime.way_out import WayOut

    isolation = config.sandbox.isolation
    way_out = WayOut(forbidden=_own_addresses(config, listener), secrets=os.environ)
    try:
        way_out.check(isolation.egress)
    except ValueError as error:
        raise ConfigError(f"sandbox.isolation.egress: {error}") from error
    pool = Pool(backend, config.sandbox.pool, [isolation], on_lend=way_out.open)
    agent = Agent(
        model,
        pool,
        partial(make_tools, config.limits),
        limits=config.limits,
        isolation=isolation,
        artifact_limits=config.artifacts,
    )
    services = Services(
        model=model,
        agent=agent,
        files=FileStore(_state_dir(config) / "files", limits=config.artifacts),
        api_key=secret(config.server.api_key_env),
        public_url=config.server.public_url,
        steps=config.server.steps,
        pool_stats=pool.stats,
    )
    return services, pool, way_out


def _own_addresses(config: "Config", listener: "socket | None") -> list["Endpoint"]:
    """Where the proxy and its model backend are to be found: no sandbox gets there."""
    import socket
    from urllib.parse import urlsplit

    url = urlsplit(config.backend.base_url or "")
    found: list[Endpoint] = [listener.getsockname()[:2]] if listener else []
    if url.hostname:
        port = url.port or (443 if url.scheme == "https" else 80)
        with suppress(OSError):  # it cannot be found from here: then neither from inside
            addresses = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
            found += [(str(address[0]), port) for *_, address in addresses]
    return found


def serve(arguments: argparse.Namespace) -> int:
    """Serve clients until told to stop."""
    import asyncio
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = _config(arguments)
    with listen(config.server.host, config.server.port) as listener:
        asyncio.run(_serve(config, build_model(config), build_backend(config), listener))
    return 0


def listen(host: str, port: int) -> "socket":
    """Where clients will be heard. Raises ConfigError."""
    import socket

    from proxy.config import ConfigError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol left out, as socket.create_server does, asyncio does not see that this is
    # TCP and leaves Nagle's algorithm on: 40 ms a request.
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
    import uvicorn

    from proxy.app import create_app
    from proxy.doctor import announce, check_model, require_sound

    await require_sound(backend, config.sandbox.isolation, self_test=config.sandbox.self_test)
    services, pool, way_out = build_services(config, model, backend, listener)
    announce(listener, backend.name, await check_model(model))
    app = create_app(services, _lifespan(services, pool, way_out, backend))
    settings = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    await uvicorn.Server(settings).serve(sockets=[listener])


def _lifespan(
    services: "Services", pool: "Pool", way_out: "WayOut", backend: "Backend"
) -> "Callable[[FastAPI], AbstractAsyncContextManager[None]]":
    import asyncio

    from sandbox_runtime.clock import SystemClock
    from sandbox_runtime.sweeper import sweep_forever

    async def sweep_files() -> None:
        while True:
            await asyncio.to_thread(services.files.sweep)
            await asyncio.sleep(FILES_SWEEP_S)

    @asynccontextmanager
    async def lifespan(app: "FastAPI") -> AsyncIterator[None]:
        sweeping = [
            asyncio.create_task(work)
            for work in (sweep_forever(backend, SystemClock()), sweep_files())
        ]
        pool.start()
        yield
        for task in sweeping:
            task.cancel()
        await asyncio.wait(sweeping)
        await pool.aclose()
        way_out.close()
        await backend.aclose()
        await services.model.aclose()

    return lifespan


def doctor(arguments: argparse.Namespace) -> int:
    """Say what works here and what isolation is in force."""
    import asyncio

    from proxy.doctor import diagnose

    config = _config(arguments)
    return asyncio.run(
        diagnose(
            build_model(config),
            _builders(config),
            config.sandbox.isolation,
            self_test=arguments.self_test,
        )
    )


def gc(arguments: argparse.Namespace) -> int:
    """Remove what dead proxies have left behind, on every backend that is there."""
    import asyncio

    from proxy.doctor import collect_garbage

    return asyncio.run(collect_garbage(_builders(_config(arguments))))


def build_image(arguments: argparse.Namespace) -> int:
    """Build the sandboxes' image with the Docker command line."""
    from sandbox_runtime.image_build import build_image

    return build_image(arguments.target, arguments.tag or _config(arguments).sandbox.docker.image)


def _builders(config: "Config") -> "dict[str, Callable[[], Backend]]":
    """What makes each kind of sandbox that the configuration allows."""
    asked = config.sandbox.backend
    kinds = ("docker", "bubblewrap") if asked == "auto" else (asked,)
    return {name: partial(build_backend, _with_backend(config, name)) for name in kinds}


def _with_backend(config: "Config", name: str) -> "Config":
    from proxy.config import parse

    tree = config.model_dump()
    tree["sandbox"]["backend"] = name
    return parse(tree, "command line")


def demo(arguments: argparse.Namespace) -> int:
    """One request from end to end, through a server of its own."""
    import asyncio
    import tempfile

    from proxy.config import ConfigError, parse
    from proxy.demo import SCRIPT, show

    if arguments.question and not (arguments.backend_url and arguments.model):
        raise ConfigError(
            "the script answers one question only; yours needs a model: name"
            " --backend-url and --model"
        )
    config = _config(arguments)
    with tempfile.TemporaryDirectory(prefix="sandbox-demo-") as directory:
        tree = config.model_dump()
        tree["server"]["state_dir"] = directory
        tree["sandbox"]["backend"] = arguments.sandbox or "bubblewrap"
        if not arguments.backend_url:
            tree["backend"] |= {"kind": "scripted", "script": SCRIPT}
        config = parse(tree, "demo")
        model, backend = build_model(config), build_backend(config)
        services, pool, way_out = build_services(config, model, backend)
        lifespan = _lifespan(services, pool, way_out, backend)
        return asyncio.run(show(services, lifespan, arguments.question, arguments.model))


if __name__ == "__main__":
    sys.exit(main())
