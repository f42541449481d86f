"""The command line: start-up errors, `demo`, `doctor` and exit codes."""

import asyncio
import json
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import jsonschema_rs
import pytest
import yaml
from aiohttp import web

from proxy.__main__ import listen
from proxy.config import Config, parse
from proxy.models.scripted import call, tool_reply
from tests.clients.openai_errors import MESSAGES, openai_client, request_error
from tests.e2e.proxy_process import ROOT, environment, run, serving, write_config
from tests.fakes.backend import scripted_backend
from tests.fakes.engine import NO_PARSER, FakeEngine

NOWHERE = "http://127.0.0.1:1/v1"


async def packages_loaded_by(program: str, home: Path) -> set[str]:
    """Return the top-level packages that a new interpreter has loaded after running the program."""
    listing = "; import json, sys; print(json.dumps(list(sys.modules)), file=sys.stderr)"
    with anyio.fail_after(60):
        done = await anyio.run_process(
            [sys.executable, "-c", program + listing], cwd=home, env=environment(home)
        )
    return {name.partition(".")[0] for name in json.loads(done.stderr)}


# What is loaded


async def test_help_lists_the_commands_without_loading_heavy_packages(tmp_path: Path) -> None:
    ask = "import contextlib, proxy.__main__\nwith contextlib.suppress(SystemExit): "
    loaded = await packages_loaded_by(
        f"{ask}proxy.__main__.main(['--help'])\nimport json", tmp_path
    )
    heavy = {"aiohttp", "docker", "fastapi", "litellm", "openai", "pydantic", "uvicorn", "yaml"}
    assert loaded & heavy == set()
    done = await run(tmp_path, "--help")
    assert done.returncode == 0
    for command in (b"serve", b"demo", b"doctor"):
        assert command in done.stdout


async def test_app_import_loads_neither_litellm_nor_docker(tmp_path: Path) -> None:
    loaded = await packages_loaded_by("import proxy.app", tmp_path)
    assert loaded & {"litellm", "docker", "openai"} == set()


async def test_version_option_prints_the_version_of_the_package(tmp_path: Path) -> None:
    done = await run(tmp_path, "--version")
    expected = f"sandbox-proxy {version('llm-sandbox-proxy')}\n"
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, expected, b"")


# config


async def test_shipped_configuration_equals_the_defaults(tmp_path: Path) -> None:
    shipped = str(ROOT / "config.yaml")
    checked = await run(tmp_path, "config", "check", "--config", shipped)
    expected = f"{shipped}: ok\n"
    assert (checked.returncode, checked.stdout.decode(), checked.stderr) == (0, expected, b"")
    shown = await run(tmp_path, "config", "show", "--config", shipped)
    defaults = await run(tmp_path, "config", "show")
    assert (shown.returncode, shown.stdout) == (0, defaults.stdout)


async def test_config_show_prints_all_settings_as_a_configuration_that_can_be_loaded(
    tmp_path: Path,
) -> None:
    written = write_config(tmp_path, {"limits": {"max_turns": 7}, "server": {"steps": "off"}})
    options = ("--port", "9000", "--profile", "strict", "--sandbox", "bubblewrap")
    variables = {"LLM_SANDBOX_SERVER__HOST": "::1"}
    shown = await run(tmp_path, "config", "show", "--config", written, *options, **variables)
    assert (shown.returncode, shown.stderr) == (0, b"")
    tree = yaml.safe_load(shown.stdout)
    given = {
        "profile": "strict",
        "limits": {"max_turns": 7},
        "sandbox": {"backend": "bubblewrap"},
        "server": {"host": "::1", "port": 9000, "steps": "off"},
    }
    assert tree == parse(given, "expected").model_dump(mode="json")
    copy = write_config(tmp_path, shown.stdout.decode())
    again = await run(tmp_path, "config", "show", "--config", copy)
    assert again.stdout == shown.stdout


async def test_shown_configuration_contains_no_secret(tmp_path: Path) -> None:
    tree = {
        "keys": [{"name": "a", "env": "CLIENT_KEY"}],
        "backend": {"base_url": "https://user:hun@ter2@models.example/v1"},
        "store": {"database_url": "postgresql://user:hunter2@db.example/proxy"},
    }
    variables = {"CLIENT_KEY": "sk-secret"}
    config = write_config(tmp_path, tree)
    shown = await run(tmp_path, "config", "show", "--config", config, **variables)
    assert shown.returncode == 0
    assert b"env: CLIENT_KEY" in shown.stdout
    assert b"base_url: https://***@models.example/v1" in shown.stdout
    assert b"database_url: postgresql://***@db.example/proxy" in shown.stdout
    assert b"sk-secret" not in shown.stdout
    assert b"ter2" not in shown.stdout


async def test_config_schema_accepts_the_default_configuration(tmp_path: Path) -> None:
    done = await run(tmp_path, "config", "schema")
    assert (done.returncode, done.stderr) == (0, b"")
    schema = json.loads(done.stdout)
    assert set(schema["properties"]) == set(Config.model_fields)
    validator = jsonschema_rs.validator_for(schema)
    assert validator.is_valid(yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8")))
    assert not validator.is_valid({"server": {"prot": 1}})


async def test_config_check_creates_no_file(tmp_path: Path) -> None:
    done = await run(tmp_path, "config", "check")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"configuration: ok\n", b"")
    assert list(tmp_path.iterdir()) == []


async def test_network_option_replaces_the_allowlist_of_the_file(tmp_path: Path) -> None:
    network = {"mode": "allowlist", "allowed_hosts": ["pypi"]}
    config = write_config(tmp_path, {"isolation": {"network": network}})
    done = await run(tmp_path, "config", "show", "--config", config, "--network", "none")
    shown = yaml.safe_load(done.stdout)["isolation"]["network"]
    assert (shown["mode"], shown["allowed_hosts"]) == ("none", [])


# Errors are one clear line


async def error_line(home: Path, *arguments: str, **variables: str) -> str:
    """Return the single error line of a command that must fail."""
    done = await run(home, *arguments, **variables)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("sandbox-proxy: ")
    return line.removeprefix("sandbox-proxy: ")


async def test_missing_docker_engine_is_reported_by_serve(tmp_path: Path) -> None:
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--sandbox", "docker", DOCKER_HOST="tcp://127.0.0.1:1"
    )
    assert line.startswith("no Docker engine answers")


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
async def test_missing_sandbox_image_is_reported_by_serve(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"sandbox": {"docker": {"image": "no/such:image"}}})
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--config", config, "--sandbox", "docker"
    )
    assert line == (
        "docker image: 'no/such:image' is missing:"
        " pull it, or build it with `sandbox-proxy build-image`"
    )


@pytest.mark.parametrize(
    "tree",
    [{"keys": [{"name": "a", "env": "NO_SUCH_KEY"}]}, {"backend": {"api_key_env": "NO_SUCH_KEY"}}],
    ids=["client", "backend"],
)
async def test_unset_environment_variable_that_a_key_setting_names_is_reported(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    config = write_config(tmp_path, tree)
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--config", config, "--sandbox", "bubblewrap"
    )
    assert (
        line
        == "the environment variable NO_SUCH_KEY is not set, but a setting or an option names it"
    )
    assert line == await error_line(tmp_path, "config", "check", "--config", config)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"server": {"prot": 1}}, "config.yaml: server.prot: Extra inputs are not permitted"),
        ({"limits": {"max_turn": 3}}, "config.yaml: limits.max_turn: "),
        ({"server": {"port": 70000}}, "config.yaml: server.port: "),
        ({"backend": {"provider": "magic"}}, "config.yaml: backend.provider: "),
        ("server: [\n", "config.yaml: while parsing"),
        ("- a list\n", "config.yaml: top: "),
        ({"backend": {"provider": "scripted"}}, "backend.script: name the YAML file to play"),
        ({"backend": {"provider": "scripted", "script": "none.yaml"}}, "backend.script: "),
        ({"backend": {"base_url": None}}, "backend.base_url: name the OpenAI-compatible server"),
    ],
)
async def test_configuration_error_names_its_field(
    tree: dict[str, Any] | str, words: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tree)
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--config", config, "--sandbox", "bubblewrap"
    )
    assert words in line
    assert line == await error_line(tmp_path, "config", "check", "--config", config)


async def test_missing_configuration_file_is_reported(tmp_path: Path) -> None:
    line = await error_line(tmp_path, "serve", "--port", "0", "--config", "none.yaml")
    assert line == "none.yaml: [Errno 2] No such file or directory: 'none.yaml'"


async def test_data_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = write_config(tmp_path, {"server": {"data_dir": str(tmp_path / "file" / "state")}})
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--config", config, "--sandbox", "bubblewrap"
    )
    assert line.startswith("server.data_dir: [Errno 20] Not a directory")


async def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = await error_line(tmp_path, "serve", "--sandbox", "bubblewrap", "--port", str(port))
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


async def test_listen_address_of_another_host_is_reported(tmp_path: Path) -> None:
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--sandbox", "bubblewrap", "--host", "192.0.2.1"
    )
    assert line.startswith("cannot listen on 192.0.2.1:0: Cannot assign requested address")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_public_listen_address_without_a_key_is_refused(host: str, tmp_path: Path) -> None:
    line = await error_line(
        tmp_path, "serve", "--port", "0", "--sandbox", "bubblewrap", "--host", host
    )
    assert line.startswith(f"server.host: everyone who can reach {host} could run commands here")
    assert line == await error_line(tmp_path, "config", "check", "--host", host)


async def test_serve_refuses_to_listen_on_a_network_address_of_the_machine_without_a_key(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no route to a network")
        host = probe.getsockname()[0]
    options = ("--port", "0", "--sandbox", "bubblewrap", "--host", host)
    line = await error_line(tmp_path, "serve", *options)
    assert line.startswith(f"server.host: everyone who can reach {host} could run commands here")


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("config", "check")])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--profile", "nonsense"), "profile: there is no profile 'nonsense'"),
        (
            ("--profile", "research", "--network", "none"),
            "--network none: the profile research sets isolation.network.mode: allowlist",
        ),
    ],
    ids=["unknown profile", "network of another profile"],
)
async def test_unknown_profile_or_conflicting_network_option_is_reported(
    command: tuple[str, ...], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    line = await error_line(tmp_path, *command, "--sandbox", "bubblewrap", *options)
    assert line.startswith(words)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--sandbox", "chroot"]])
async def test_unknown_command_or_option_value_prints_the_usage(
    arguments: list[str], tmp_path: Path
) -> None:
    done = await run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"usage: sandbox-proxy")


# demo


async def test_demo_answers_and_writes_its_files(tmp_path: Path) -> None:
    done = await run(tmp_path, "demo")
    assert (done.returncode, done.stderr.decode()) == (0, "")
    printed = done.stdout.decode()
    assert "a script plays its part" in printed
    assert "\x1b" not in printed  # colours are for a terminal
    assert "$ python3 primes.py" in printed
    assert "There are 78,498 primes up to 1,000,000" in printed
    files = {path.name: path.read_text() for path in (tmp_path / "demo-output").iterdir()}
    assert set(files) == {"primes.csv", "primes.svg"}
    assert files["primes.csv"].splitlines()[-1].startswith("1000000,78498,72382.4,")
    assert files["primes.svg"].startswith("<svg ")
    assert [path.name for path in tmp_path.iterdir()] == ["demo-output"]


async def test_demo_with_a_given_question_needs_a_backend_and_a_model(tmp_path: Path) -> None:
    line = await error_line(tmp_path, "demo", "What is 6 * 7?")
    assert "--backend-url" in line
    assert "--model" in line


async def test_demo_reports_an_unreachable_backend(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"backend": {"max_retries": 1}})
    asked = ("demo", "What is 6 * 7?", "--config", config)
    done = await run(tmp_path, *asked, "--backend-url", NOWHERE, "--model", "any")
    assert done.returncode == 1
    assert b"the backend cannot be reached" in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr


async def test_serve_logs_the_network_of_each_profile_that_a_key_may_use(tmp_path: Path) -> None:
    keys = [{"name": "lab", "env": "LAB_KEY", "profiles": ["research"]}]
    async with serving(tmp_path, "bubblewrap", NOWHERE, {"keys": keys}, LAB_KEY="sk-1") as server:
        lines = [line.partition(" INFO ")[2] for line in server.log.splitlines()]
    networks = [line for line in lines if "network" in line]
    assert networks == [
        "sandboxes: bubblewrap; network: none",
        "network in profile research: allowlist (pypi, npm, debian, conda)",
    ]


# doctor


def findings(done: subprocess.CompletedProcess[bytes]) -> dict[str, bool]:
    """Return the result of each check of `doctor`, by name."""
    checks = [
        line.partition(":")[0].split(maxsplit=1)
        for line in done.stdout.decode().splitlines()
        if line.startswith(("ok ", "-- ", "FAIL "))
    ]
    return {name: verdict == "ok" for verdict, name in checks}


async def test_doctor_passes_all_checks(tmp_path: Path) -> None:
    script = str(ROOT / "proxy" / "demo.yaml")
    config = write_config(tmp_path, {"backend": {"provider": "scripted", "script": script}})
    done = await run(tmp_path, "doctor", "--config", config, "--sandbox", "bubblewrap")
    found = findings(done)
    assert (done.returncode, done.stderr) == (0, b"")
    named = {"model backend", "bubblewrap", "user", "network", "bubblewrap sandbox", "files"}
    assert {*named, "terminals"} <= set(found)
    assert b"ok    terminals: the host has " in done.stdout
    assert all(ok for name, ok in found.items() if not name.startswith("image "))


async def test_doctor_continues_after_a_failed_check(tmp_path: Path) -> None:
    done = await run(tmp_path, "doctor", "--sandbox", "bubblewrap", "--backend-url", NOWHERE)
    found = findings(done)
    assert (done.returncode, done.stderr) == (1, b"")
    missed = [name for name, ok in found.items() if not ok and not name.startswith("image ")]
    assert missed == ["model backend"]
    assert found["bubblewrap sandbox"]


def needs_key(request: web.Request) -> web.Response | None:
    if request.headers.get("authorization") == "Bearer sk-good":
        return None
    return web.json_response({"error": {"message": "Who are you?"}}, status=401)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ((), "FAIL  model backend: it requires a key, and none is sent: name the environment"
         " variable with the key in --backend-key-env or backend.api_key_env (Who are you?)"),
        (("--backend-key-env", "BAD"),
         "FAIL  model backend: it refuses the key in the environment variable BAD (Who are you?)"),
        (("--backend-key-env", "GOOD"), "ok    model backend: fake-model"),
    ],
    ids=["no key", "wrong key", "right key"],
)  # fmt: skip
async def test_doctor_reports_a_missing_or_wrong_backend_key(
    option: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    async with scripted_backend([], let_in=needs_key) as backend:
        asked = ("doctor", "--sandbox", "docker", "--backend-url", backend.base_url, *option)
        nowhere = "tcp://127.0.0.1:1"
        done = await run(tmp_path, *asked, GOOD="sk-good", BAD="sk-bad", DOCKER_HOST=nowhere)
    assert line in done.stdout.decode().splitlines()


async def test_forwarded_client_keys_are_verified_at_the_backend(tmp_path: Path) -> None:
    submit = tool_reply(call("submit", answer="Forty-two."))
    forwards = {"backend": {"forward_client_key": True}}
    async with (
        scripted_backend([submit], let_in=needs_key) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, forwards) as server,
        openai_client(server.url, "sk-good") as client,
        openai_client(server.url, "sk-bad") as stranger,
    ):
        with anyio.fail_after(60):
            answer = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        error = await request_error(stranger)
    assert answer.choices[0].message.content == "Forty-two."
    assert (error.status_code, error.code) == (401, "invalid_api_key")
    assert "Incorrect API key provided" in error.message


async def test_setting_forward_client_key_is_refused_together_with_client_keys(
    tmp_path: Path,
) -> None:
    tree = {"backend": {"forward_client_key": True}, "keys": [{"name": "a", "env": "OURS"}]}
    config = write_config(tmp_path, tree)
    line = await error_line(tmp_path, "serve", "--port", "0", "--config", config, OURS="sk-1")
    assert line.startswith("backend.forward_client_key: remove keys")


async def test_doctor_reports_a_missing_engine(tmp_path: Path) -> None:
    done = await run(tmp_path, "doctor", "--sandbox", "docker", DOCKER_HOST="tcp://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (1, b"")
    assert findings(done) == {"model backend": False, "docker": False, "sandboxes": False}
    last = done.stdout.decode().splitlines()[-1]
    assert last == "`sandbox-proxy serve` would not work: correct the lines marked FAIL."


async def test_doctor_accepts_bubblewrap_in_place_of_docker(tmp_path: Path) -> None:
    script = str(ROOT / "proxy" / "demo.yaml")
    tree = {"sandbox": {"docker": {"image": "no/such:image"}}}
    config = write_config(tmp_path, {**tree, "backend": {"provider": "scripted", "script": script}})
    done = await run(tmp_path, "doctor", "--config", config)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("--    docker: ")]
    assert "ok    sandboxes: bubblewrap" in lines
    assert lines[-1] == "`sandbox-proxy serve` would work."


NAMED_ENGINES: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"host": "tcp://127.0.0.1:1"}, {}),
    ({"runtime": "runsc", "host": "tcp://127.0.0.1:1"}, {}),
    ({}, {"DOCKER_HOST": "tcp://127.0.0.1:1"}),
]


@pytest.mark.parametrize(("docker", "variables"), NAMED_ENGINES)
async def test_configured_engine_is_never_replaced_by_bubblewrap(
    docker: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, {"sandbox": {"docker": docker}})
    line = await error_line(tmp_path, "serve", "--port", "0", "--config", config, **variables)
    assert line.startswith("no Docker engine answers at tcp://127.0.0.1:1")
    done = await run(tmp_path, "doctor", "--config", config, **variables)
    assert findings(done) == {"model backend": False, "docker": False, "sandboxes": False}


@pytest.mark.parametrize(
    ("engine", "ok", "words"),
    [
        (FakeEngine(), True, "ok    tools of fake-model: supported"),
        (FakeEngine(template="ignores tools"), False, "--chat-template-file FILE"),
        (
            FakeEngine(refusal=NO_PARSER),
            False,
            "--enable-auto-tool-choice --tool-call-parser PARSER",
        ),
    ],
    ids=["supported", "ignored", "refused"],
)
async def test_doctor_reports_tool_support_of_each_model(
    engine: FakeEngine, ok: bool, words: str, tmp_path: Path
) -> None:
    async with scripted_backend(engine.reply, elsewhere=engine.elsewhere) as backend:
        where = ("--sandbox", "bubblewrap", "--backend-url", backend.base_url)
        done = await run(tmp_path, "doctor", *where)
    assert (done.returncode, done.stderr) == (0, b"")
    assert findings(done)["tools of fake-model"] is ok
    lines = done.stdout.decode().splitlines()
    assert [words in line for line in lines if "tools of fake-model" in line] == [True]
    last = "None of the tested models is known to support tools, which a sandbox needs."
    assert (lines[-1] == last) is not ok


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
async def test_doctor_reports_a_missing_image(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"sandbox": {"docker": {"image": "no/such:image"}}})
    done = await run(tmp_path, "doctor", "--config", config, "--sandbox", "docker")
    found = findings(done)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (found["docker engine"], found["docker image"]) == (True, False)


async def test_accepted_connections_have_tcp_nodelay() -> None:
    """Nagle's algorithm costs 40 ms a request; asyncio disables it only for sockets it knows are
    TCP.
    """
    accepted: asyncio.Queue[int] = asyncio.Queue()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listen("127.0.0.1", 0) as listener, anyio.fail_after(5):
        server = await asyncio.start_server(record, sock=listener)
        async with server, await anyio.connect_tcp(*listener.getsockname()):
            assert await accepted.get() == 1
