"""A model reaches what its rules name and nothing else, and is told so; the log shows both."""

import ipaddress
import logging
import socket
from pathlib import Path

import anyio
import httpx
import pytest

from policies.egress import PRESETS, Egress
from policies.isolation import Isolation
from proxy.models.scripted import call, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import house

PATIENCE_S = 180.0


@pytest.fixture
def registry() -> Egress:
    """The preset for PyPI, whatever this network's addresses for it look like."""
    networks = set()
    try:
        for host in PRESETS["pypi"]:
            for *_, address in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM):
                ip = ipaddress.ip_address(address[0])
                networks |= set() if ip.is_global else {f"{ip}/{ip.max_prefixlen}"}
    except OSError as error:
        pytest.skip(f"this machine reaches no PyPI: {error}")
    return Egress("allowlist", ("pypi",), tuple(sorted(networks)))


@pytest.mark.docker
async def test_a_model_installs_a_package_and_is_refused_another_host(
    registry: Egress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    commands = [
        "pip install --no-cache-dir six && python3 -c 'import six; print(six.__name__, \"works\")'",
        "curl -sS https://example.com; curl -sS http://example.com",
        "curl -sS --noproxy '*' https://pypi.org; getent hosts pypi.org || echo no names",
    ]
    replies = [
        *(tool_reply(call("execute_bash", command=command)) for command in commands),
        tool_reply(call("submit", answer="done")),
    ]
    async with scripted_backend(replies) as backend:
        async with (
            house(backend, "docker", tmp_path, Isolation(egress=registry)) as url,
            httpx.AsyncClient(timeout=PATIENCE_S) as client,
        ):
            with anyio.fail_after(PATIENCE_S):
                body = {"model": "m", "messages": [{"role": "user", "content": "Install."}]}
                await client.post(f"{url}/v1/chat/completions", json=body)
        told = [m["content"] for m in backend.requests[-1].body["messages"] if m["role"] == "tool"]
    assert "\nsix works" in told[0]
    assert "example.com is not in this sandbox's allowlist (allowed: pypi.org, " in told[1]
    assert "Could not resolve host" in told[2]
    assert "no names" in told[2]
    lines = [line for line in caplog.messages if " egress " in line]
    assert any(" egress allowed pypi.org:443, " in line for line in lines)
    assert any(" egress denied example.com:443, " in line for line in lines)
    assert any(" egress denied example.com:80, " in line for line in lines)
