"""Starts that would weaken isolation: they are refused, or permitted by an option or a warning."""

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES
from tests.e2e.proxy_process import Server, run, serving, write_config
from tests.e2e.test_command import error_line, findings
from tests.fakes.backend import scripted_backend

NO_IMAGE = "no/such:image"
ENGINE_SOCKET = Path("/var/run/docker.sock")
TWO_KEYS = [{"name": "a", "env": "KEY_A"}, {"name": "b", "env": "KEY_B"}]
SECRETS = {"KEY_A": "sk-a", "KEY_B": "sk-b"}


@pytest.fixture
def no_cgroups() -> tuple[str, ...]:
    """Return a command that executes the command after it where no cgroup is writable. Skips the
    test if this process may not make a mount namespace."""
    return after_mount("-t tmpfs none /sys/fs/cgroup") if os.geteuid() == 0 else ()


@pytest.fixture
def no_engine() -> tuple[str, ...]:
    """Return a command that executes the command after it where no Docker engine answers. Skips the
    test if this process may not make a mount namespace."""
    unnamed = ("env", "--unset=DOCKER_HOST")
    if not ENGINE_SOCKET.exists():
        return unnamed
    return (*unnamed, *after_mount(f"--bind /dev/null {ENGINE_SOCKET}"))


def after_mount(arguments: str) -> tuple[str, ...]:
    """Return a command that executes the command after it in a namespace with one more mount."""
    prefix = ("unshare", "--mount", "sh", "-c", f'mount {arguments} && exec "$@"', "sh")
    done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if done.returncode != 0:
        if os.environ.get("REQUIRE_DOCKER"):
            raise AssertionError(done.stderr)
        pytest.skip(f"no mount namespace can be made: {done.stderr!r}")
    return prefix


# Paths that the backend keeps state behind


def passthrough_config(home: Path, keys: list[dict[str, str]], **backend: Any) -> str:
    return write_config(home, {"keys": keys, "backend": {"passthrough": "all", **backend}})


async def test_passthrough_all_is_refused_with_several_keys(tmp_path: Path) -> None:
    config = passthrough_config(tmp_path, TWO_KEYS)
    where = ("--port", "0", "--sandbox", "bubblewrap", "--config", config)
    line = await error_line(tmp_path, "serve", *where, **SECRETS)
    assert line.startswith("backend.passthrough: with all, each of the several keys can list, read")
    assert line.endswith("set backend.passthrough_shared: true")
    assert line == await error_line(tmp_path, "config", "check", "--config", config, **SECRETS)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [(TWO_KEYS, {"passthrough_shared": True}), (TWO_KEYS[:1], {}), ([], {})],
    ids=["shared", "one key", "no key"],
)
async def test_passthrough_all_is_accepted_with_at_most_one_key_or_with_passthrough_shared(
    keys: list[dict[str, str]], settings: dict[str, bool], tmp_path: Path
) -> None:
    config = passthrough_config(tmp_path, keys, **settings)
    done = await run(tmp_path, "config", "check", "--config", config, **SECRETS)
    assert (done.returncode, done.stderr) == (0, b"")


# URLs that the backend fetches


async def test_private_url_is_forwarded_to_a_backend_that_fetches_urls(tmp_path: Path) -> None:
    url = "http://10.0.0.1/secret.png"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "fake-model:plain", "messages": [{"role": "user", "content": parts}]}
    async with (
        scripted_backend([text_reply("Seen.")]) as backend,
        serving(
            tmp_path, "bubblewrap", backend.base_url, {"backend": {"fetches_urls": True}}
        ) as server,
        httpx.AsyncClient(timeout=30) as client,
    ):
        answer = await client.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert backend.requests[-1].body["messages"] == body["messages"]


# Addresses that other machines can reach


async def test_serve_accepts_a_public_listen_address_with_allow_open(tmp_path: Path) -> None:
    options = ("--host", "0.0.0.0", "--allow-open")
    async with (
        scripted_backend([]) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, options=options) as server,
        httpx.AsyncClient() as client,
    ):
        url = httpx.URL(server.url)
        assert url.host == "0.0.0.0"
        answer = await client.get(url.copy_with(host="127.0.0.1", path="/health"))
    assert answer.json() == {"status": "ok"}


# Sandbox backends


async def test_missing_image_falls_back_to_bubblewrap_with_one_warning(tmp_path: Path) -> None:
    more = {"sandbox": {"docker": {"image": NO_IMAGE}}}
    async with (
        scripted_backend([tool_reply(call("submit", answer="Done."))]) as backend,
        serving(tmp_path, "auto", backend.base_url, more) as server,
        httpx.AsyncClient(timeout=30) as client,
    ):
        body = {"model": "fake-model", "messages": MESSAGES}
        answer = await client.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "Done."
    fallback_warning(server)


async def test_missing_engine_falls_back_to_bubblewrap_with_one_warning(
    no_engine: tuple[str, ...], tmp_path: Path
) -> None:
    nothing_named: dict[str, Any] = {"sandbox": {}}
    async with (
        scripted_backend([]) as backend,
        serving(tmp_path, "auto", backend.base_url, nothing_named, prefix=no_engine) as server,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"{server.url}/health")).json() == {"status": "ok"}
        checked = await run(tmp_path, "doctor", "--backend-url", backend.base_url, prefix=no_engine)
    assert "no Docker engine answers at unix://" in fallback_warning(server)
    assert checked.returncode == 0
    assert (findings(checked)["docker"], findings(checked)["sandboxes"]) == (False, True)


def fallback_warning(server: Server) -> str:
    """Return the only warning that bubblewrap is used in place of an engine. The warning has to
    name the isolation that is lost."""
    lines = server.log.splitlines()
    (warning,) = [line for line in lines if "bubblewrap instead" in line]
    assert " WARNING " in warning
    assert "its sandboxes share the host's kernel and see its /usr" in warning
    assert "build the image (sandbox-proxy build-image)" in warning
    assert any(" INFO sandboxes: bubblewrap" in line for line in lines)
    return warning


@pytest.mark.parametrize(
    ("runtime", "reason"), [("no-such-runtime", "no-such-runtime"), ("runc", NO_IMAGE)]
)
async def test_configured_runtime_is_never_replaced_by_bubblewrap(
    runtime: str, reason: str, tmp_path: Path
) -> None:
    docker = {"runtime": runtime, "image": NO_IMAGE}
    config = write_config(tmp_path, {"sandbox": {"docker": docker}})
    checked = await run(tmp_path, "doctor", "--config", config)
    assert checked.returncode == 1
    assert not [name for name in findings(checked) if "bubblewrap" in name]
    line = await error_line(tmp_path, "serve", "--port", "0", "--config", config)
    assert "no Docker engine answers" in line or reason in line


async def test_configured_engines_are_never_replaced_by_bubblewrap(tmp_path: Path) -> None:
    docker = {"hosts": [{"url": "tcp://127.0.0.1:1"}], "image": NO_IMAGE}
    config = write_config(tmp_path, {"sandbox": {"docker": docker}})
    done = await run(tmp_path, "serve", "--port", "0", "--config", config)
    assert done.returncode == 1
    assert b"no Docker engine can be used: tcp://127.0.0.1:1" in done.stderr


async def test_bubblewrap_without_cgroups_is_refused_unless_weak_limits_are_allowed(
    no_cgroups: tuple[str, ...], tmp_path: Path
) -> None:
    where = ("--port", "0", "--sandbox", "bubblewrap")
    refused = await run(tmp_path, "serve", *where, prefix=no_cgroups)
    assert refused.returncode == 1
    assert refused.stderr.decode().startswith("sandbox-proxy: bounds: per process only")
    assert b"--allow-weak" in refused.stderr
    async with (
        scripted_backend([]) as backend,
        serving(
            tmp_path,
            "bubblewrap",
            backend.base_url,
            prefix=no_cgroups,
            options=("--allow-weak",),
        ) as server,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"{server.url}/health")).json() == {"status": "ok"}


async def test_allow_weak_option_changes_only_its_setting(tmp_path: Path) -> None:
    shown = [await run(tmp_path, "config", "show", *option) for option in ((), ("--allow-weak",))]
    default, weak = [yaml.safe_load(each.stdout) for each in shown]
    assert default["sandbox"]["bubblewrap"]["allow_weak"] is False
    default["sandbox"]["bubblewrap"]["allow_weak"] = True
    assert weak == default


async def test_demo_runs_without_cgroups(no_cgroups: tuple[str, ...], tmp_path: Path) -> None:
    done = await run(tmp_path, "demo", prefix=no_cgroups)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert {path.name for path in (tmp_path / "demo-output").iterdir()} == {
        "primes.csv",
        "primes.svg",
    }
