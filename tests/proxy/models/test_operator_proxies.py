"""The operator's forward proxies, which only calls to the backend use."""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from policies.egress import Egress, EgressRules
from policies.hosts import Target
from proxy.bootstrap import build_model, own_addresses
from proxy.config import ConfigError, parse
from proxy.errors import BackendError
from proxy.fetch import ByteBudget, Fetcher
from proxy.models.litellm_model import LiteLLMModel
from proxy.models.operator_proxies import proxy_for
from proxy.models.scripted import text_reply
from sandbox_runtime.egress.dialer import Dialer
from tests.e2e.proxy_process import serving
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.forward_proxy import ForwardProxy, forward_proxy
from tests.sandbox_runtime.egress.internet import CERTIFICATE, PUBLIC, Internet, Origin

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
BOTH = {"http": "http://p.example:3128", "https": "http://s.example:3128"}
NETRC = "machine backend.example login netrc-user password netrc-password\n"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


# Selection of a proxy


@pytest.mark.parametrize(
    ("url", "proxies", "expected"),
    [
        ("http://backend.example/v1", BOTH, BOTH["http"]),
        ("https://backend.example/v1", BOTH, BOTH["https"]),
        ("https://8.8.8.8/v1", BOTH, BOTH["https"]),
        ("https://backend.example/v1", {"http": BOTH["http"]}, None),
        ("https://backend.example/v1", {"all": "http://a.example"}, "http://a.example"),
        ("https://backend.example/v1", {"https": "p.example:3128"}, "http://p.example:3128"),
        ("https://backend.example/v1", {}, None),
        ("http://backend.example/v1", {**BOTH, "no": "backend.example"}, None),
        ("http://a.backend.example/v1", {**BOTH, "no": ".backend.example"}, None),
        ("http://backend.example:81/v1", {**BOTH, "no": "backend.example:81"}, None),
        ("http://backend.example/v1", {**BOTH, "no": "backend.example:81"}, BOTH["http"]),
        ("http://backend.example/v1", {**BOTH, "no": "*"}, None),
        ("http://backend.example/v1", {**BOTH, "no": "other.example"}, BOTH["http"]),
        ("socks5://backend.example/v1", {**BOTH, "no": "*"}, None),
    ],
)
def test_forward_proxy_is_chosen_by_the_url_scheme_and_the_no_proxy_list(
    url: str, proxies: dict[str, str], expected: str | None
) -> None:
    assert proxy_for(url, proxies) == expected


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.8.8", "[::1]", "0.0.0.0", "localhost", "LOCALHOST", "api.localhost"),
        *("10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1", "[fd00::1]"),
        *("[fe80::1]", "[::ffff:10.0.0.1]", "vllm", "localhost."),
    ],
)
def test_backend_on_loopback_or_in_a_private_network_uses_no_forward_proxy(host: str) -> None:
    assert proxy_for(f"http://{host}:8000/v1", BOTH) is None
    assert proxy_for(f"https://{host}/v1", BOTH) is None


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("socks5://p.example:1080", "is a socks5 proxy"),
        ("http://", "has no host, or an invalid port"),
        ("http://p.example:port", "has no host, or an invalid port"),
    ],
)
def test_invalid_forward_proxy_is_a_configuration_error(
    proxy: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    config = parse({"backend": {"base_url": "https://backend.example/v1"}}, "c.yaml")
    with pytest.raises(ConfigError, match=message):
        build_model(config)


def test_upstream_with_another_forward_proxy_than_the_backend_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://p.example:3128")
    monkeypatch.setenv("no_proxy", "backend.example")
    tree = {"base_url": "https://backend.example/v1"}
    build_model(parse({"backend": {**tree, "upstreams": ["http://127.0.0.1:9000"]}}, "c.yaml"))
    behind_proxy = {**tree, "upstreams": ["https://gateway.example/v1"]}
    with pytest.raises(ConfigError, match="the same forward proxy"):
        build_model(parse({"backend": behind_proxy}, "c.yaml"))


# Requests through a proxy


@asynccontextmanager
async def behind_proxy(
    monkeypatch: pytest.MonkeyPatch, *, refusal: bytes = b"", user: str = "", replies: int = 1
) -> AsyncIterator[tuple[ScriptedBackend, ForwardProxy]]:
    """Run a backend, and a proxy that the environment names."""
    async with (
        scripted_backend([text_reply("42")] * replies) as backend,
        forward_proxy(port_of(backend), refusal) as proxy,
    ):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("://", f"://{user}"))
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("://", f"://{user}"))
        yield backend, proxy


def port_of(backend: ScriptedBackend) -> int:
    return int(backend.base_url.rsplit(":", 1)[1].split("/")[0])


async def complete(base_url: str) -> str:
    """Return the text of a completion by the model that the configuration describes."""
    model = build_model(parse({"backend": {"base_url": base_url, "max_retries": 0}}, "c.yaml"))
    with anyio.fail_after(10):
        async with aclosing(model):
            return str((await model.complete(BODY, None)).message["content"])


async def test_backend_is_reached_through_the_forward_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind_proxy(monkeypatch, user="me:secret@") as (backend, proxy):
        assert await complete("http://backend.example/v1") == "42"
    assert proxy.asked == ["POST http://backend.example/v1/chat/completions"]
    assert proxy.authorizations == ["Basic bWU6c2VjcmV0"]
    assert backend.requests[0].headers["host"] == "backend.example"


async def test_backend_that_is_exempt_from_the_forward_proxy_is_reached_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind_proxy(monkeypatch) as (backend, proxy):
        assert await complete(backend.base_url) == "42"
    assert proxy.asked == []


async def test_no_credentials_come_from_a_netrc_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(NETRC + NETRC.replace("backend.example", "127.0.0.1"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with behind_proxy(monkeypatch) as (backend, proxy):
        assert await complete("http://backend.example/v1") == "42"
    assert "authorization" not in backend.requests[0].headers
    assert proxy.authorizations == []


async def test_refusal_by_the_forward_proxy_is_reported_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    async with behind_proxy(monkeypatch, refusal=refusal, user="me:secret@") as (_, proxy):
        with pytest.raises(BackendError) as raised:
            await complete("https://backend.example/v1")
    assert proxy.asked == ["CONNECT backend.example:443"]
    assert "the proxy refused with 407" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_server_tunnels_tls_through_the_forward_proxy_to_its_backend(tmp_path: Path) -> None:
    """The server is a separate process, because Python reads SSL_CERT_FILE once."""
    completion = (
        b'{"choices": [{"message": {"role": "assistant", "content": "42"}, '
        b'"finish_reason": "stop"}]}'
    )

    async def backend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"content-length: (\d+)", head.lower()):
            await reader.readexactly(int(length[1]))
        response = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(response + b"Content-Length: %d\r\n\r\n" % len(completion) + completion)
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server = await asyncio.start_server(backend, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    with anyio.fail_after(60):
        async with forward_proxy(port) as proxy, httpx.AsyncClient(trust_env=False) as client:
            variables = {
                "HTTPS_PROXY": proxy.url,
                "NO_PROXY": "",
                "SSL_CERT_FILE": str(CERTIFICATE),
            }
            async with serving(
                tmp_path, "bubblewrap", "https://allowed.example/v1", **variables
            ) as own_server:
                body = {**BODY, "model": "m:plain"}
                response = await client.post(f"{own_server.url}/v1/chat/completions", json=body)
    server.close()
    assert response.json()["choices"][0]["message"]["content"] == "42"
    assert proxy.asked[-1] == "CONNECT allowed.example:443"


@pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")
async def test_litellm_uses_the_forward_proxy_except_for_exempt_backends_and_reads_no_netrc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(NETRC)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("AIOHTTP_TRUST_ENV", "True")  # litellm's own switch, which reads netrc
    async with behind_proxy(monkeypatch, replies=2) as (backend, proxy):
        monkeypatch.setenv("no_proxy", "other.example")
        for base_url in ("http://backend.example/v1", backend.base_url):
            model = LiteLLMModel(["hosted_vllm/m"], api_key="sk-1", api_base=base_url, timeout_s=10)
            with anyio.fail_after(60):
                async with aclosing(model):
                    completion = await model.complete({**BODY, "model": "hosted_vllm/m"}, None)
            assert completion.message["content"] == "42"
        assert os.environ["no_proxy"] == "other.example,localhost,127.0.0.1,::1"
    assert proxy.asked == ["POST http://backend.example/v1/chat/completions"]
    assert [seen.headers["authorization"] for seen in backend.requests] == ["Bearer sk-1"] * 2


# Connections without a proxy


async def test_fetcher_and_egress_use_no_forward_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    internet, origin = Internet(), Origin()
    async with behind_proxy(monkeypatch) as (_, proxy), internet.server(origin):
        with anyio.fail_after(10):
            fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
            budget = ByteBudget(1 << 20, "key")
            await fetcher.fetch("http://allowed.example/a", max_bytes=1 << 20, budget=budget)
            rules = EgressRules(Egress(mode="open"))
            dialer = Dialer(rules, (), internet.resolve, internet.connect, 5)
            _, writer = await dialer.dial(Target("allowed.example", 80))
            writer.transport.abort()
    assert internet.dialed == [(PUBLIC, 80), (PUBLIC, 80)]
    assert proxy.asked == []


def test_own_addresses_include_those_of_backends_and_forward_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", "127.0.0.2:3128")
    monkeypatch.setenv("HTTPS_PROXY", "https://me:secret@127.0.0.3")
    monkeypatch.setenv("NO_PROXY", "10.0.0.1")
    tree = {"base_url": "http://127.0.0.4:8000/v1", "upstreams": ["http://127.0.0.5:9000/a"]}
    config = parse({"backend": tree}, "c.yaml")
    expected = [("127.0.0.4", 8000), ("127.0.0.5", 9000), ("127.0.0.2", 3128), ("127.0.0.3", 443)]
    assert sorted(own_addresses(config, None)) == sorted(expected)
