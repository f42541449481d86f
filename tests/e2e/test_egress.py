"""Egress rules in real sandboxes: allowed and denied hosts, as seen by the model and in the log."""

import logging
import shutil
from pathlib import Path

import anyio
import httpx
import pytest

from policies.egress import PRESETS, Egress
from policies.isolation import Isolation
from proxy.models.scripted import call, tool_reply
from tests.e2e.networks import addresses_of
from tests.fakes.backend import scripted_backend
from tests.fakes.server import Kind, running_proxy

TIMEOUT_S = 240.0


def preset(name: str) -> Egress:
    """Return the preset, with the private networks that this host resolves its names to."""
    return Egress("allowlist", (name,), addresses_of(PRESETS[name]))


async def observations(kind: Kind, egress: Egress, state_dir: Path, *commands: str) -> list[str]:
    """Return the observations of a model that runs the commands, one per turn."""
    replies = [
        *(tool_reply(call("execute_bash", command=command)) for command in commands),
        tool_reply(call("submit", answer="done")),
    ]
    async with scripted_backend(replies) as backend:
        async with (
            running_proxy(backend, kind, state_dir, Isolation(network=egress)) as url,
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        ):
            with anyio.fail_after(TIMEOUT_S):
                body = {"model": "m", "messages": [{"role": "user", "content": "Install."}]}
                await client.post(f"{url}/v1/chat/completions", json=body)
        return [m["content"] for m in backend.requests[-1].body["messages"] if m["role"] == "tool"]


@pytest.mark.docker
async def test_pypi_package_is_installed_and_other_hosts_are_denied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    installed, refused, unreached = await observations(
        "docker",
        preset("pypi"),
        tmp_path,
        "pip install --no-cache-dir six && python3 -c 'import six; print(six.__name__, \"works\")'",
        "curl -sS https://example.com; curl -sS http://example.com",
        "curl -sS --noproxy '*' https://pypi.org; getent hosts pypi.org || echo no names",
    )
    assert "\nsix works" in installed
    assert "example.com is not in this sandbox's allowlist (allowed: pypi.org, " in refused
    assert "Could not resolve host" in unreached
    assert "no names" in unreached
    lines = [line for line in caplog.messages if " egress " in line]
    assert any(" egress allowed pypi.org:443, " in line for line in lines)
    assert any(" egress denied example.com:443, " in line for line in lines)
    assert any(" egress denied example.com:80, " in line for line in lines)


@pytest.mark.docker
async def test_pip_without_a_network_fails_after_one_retry(tmp_path: Path) -> None:
    (observation,) = await observations("docker", Egress(), tmp_path, "pip install six")
    assert observation.count("403 Forbidden: this sandbox has no network") == 1
    assert observation.count("Retrying") == 1
    assert "No matching distribution found for six" in observation


@pytest.mark.docker
async def test_debian_package_is_installed(tmp_path: Path) -> None:
    (observation,) = await observations(
        "docker",
        preset("debian"),
        tmp_path,
        "apt-get update -qq && apt-get install -qq -y hello > /dev/null 2>&1 && hello",
    )
    assert "Hello, world!" in observation


@pytest.mark.skipif(not shutil.which("npm"), reason="this machine has no npm for sandboxes to use")
async def test_npm_package_is_installed(tmp_path: Path) -> None:
    (observation,) = await observations(
        "bubblewrap",
        preset("npm"),
        tmp_path,
        'npm install --no-audit --no-fund is-odd && node -p \'require("is-odd")(3) + " works"\'',
    )
    assert "true works" in observation
