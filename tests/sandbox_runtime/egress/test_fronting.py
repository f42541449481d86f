"""A request that names two hosts never reaches a host that the rules have not allowed."""

import pytest
from anyio import fail_after

from policies.egress import Egress
from tests.sandbox_runtime.egress.internet import Internet, Origin
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://allowed.example/", "evil.example"),
        ("http://allowed.example/", "allowed.example, evil.example"),
        ("http://allowed.example/", "allowed.example\r\nHost: evil.example"),
        ("http://allowed.example/", "allowed.example\r\nhost: allowed.example"),
        ("http://allowed.example/", "allowed.example:81"),
        ("http://allowed.example/", "allowed.example@evil.example"),
        ("http://allowed.example/", ""),
        ("http://allowed.example@evil.example/", "allowed.example"),
        ("http://user:secret@allowed.example/", "allowed.example"),
        ("http://evil.example#@allowed.example/", "allowed.example"),
        ("http://evil.example\\@allowed.example/", "allowed.example"),
        ("http://allowed.example#.evil.example/", "allowed.example"),
        ("http://allowed.example/a#b", "allowed.example"),
        ("http://allowed.example:/", "allowed.example"),
        ("http://allowed.example:80:81/", "allowed.example"),
        ("http://allowed%2eexample/", "allowed.example"),
        ("http:///allowed.example/", "allowed.example"),
        ("http://", "allowed.example"),
        ("http:allowed.example", "allowed.example"),
        ("//allowed.example/", "allowed.example"),
        ("/", "allowed.example"),
        ("*", "allowed.example"),
        ("allowed.example:80", "allowed.example"),
        ("https://allowed.example/", "allowed.example"),
        ("ftp://allowed.example/", "allowed.example"),
        ("http://allowed.example:443/", "allowed.example:443"),
    ],
)
async def test_a_request_that_names_two_hosts_or_none_is_refused(url: str, host: str) -> None:
    internet = Internet()
    async with gateway_client(allowlist("allowed.example"), internet) as sandbox:
        with fail_after(5):
            answer = await sandbox.exchange(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"400", b"403")
    assert internet.lookups == internet.dialed == []


async def test_missing_host_header_is_refused_except_in_http_1_0() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            assert b" 400 " in await sandbox.exchange(
                b"GET http://allowed.example/ HTTP/1.1\r\n\r\n"
            )
            assert b" 200 " in await sandbox.exchange(
                b"GET http://allowed.example/ HTTP/1.0\r\n\r\n"
            )
    assert origin.heads == [b"GET / HTTP/1.0\r\nHost: allowed.example\r\nConnection: close\r\n\r\n"]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("HTTP://ALLOWED.example./?x", "allowed.EXAMPLE:80"),
        ("http://allowed.example:0080?x", "allowed.example."),
        ("http://allowed.example:80?x", "\uff41llowed.example"),
    ],
)
async def test_different_spellings_of_one_host_in_a_request_are_accepted(
    url: str, host: str
) -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            await sandbox.exchange(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert origin.heads == [
        b"GET /?x HTTP/1.1\r\nHost: allowed.example\r\nConnection: close\r\n\r\n"
    ]


async def test_internationalised_name_equals_its_ascii_form() -> None:
    internet, origin = Internet({"xn--bcher-kva.example": ["93.184.215.14"]}), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("bücher.example"), internet) as sandbox,
    ):
        with fail_after(5):
            await sandbox.exchange(
                "GET http://BÜCHER.example/ HTTP/1.1\r\nHost: bücher.example\r\n\r\n".encode()
            )
    assert internet.lookups == ["xn--bcher-kva.example"]
    assert b"\r\nHost: xn--bcher-kva.example\r\n" in origin.heads[0]


@pytest.mark.parametrize("opening", ["CONNECT", "SOCKS"])
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
    ],
)
async def test_tunnel_to_port_80_refuses_requests_that_are_not_for_its_host(
    opening: str, request_bytes: bytes
) -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(Egress(mode="open"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await (
                sandbox.connect("allowed.example:80")
                if opening == "CONNECT"
                else sandbox.socks(b"\x03\x0fallowed.example", 80)
            )
            writer.write(request_bytes)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            decision = await sandbox.only_decision()
    assert origin.heads == []
    assert (decision.host, decision.verdict) == ("allowed.example", "denied")


async def test_tunnel_to_port_80_passes_a_request_for_its_host() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect("allowed.example:80")
            writer.write(b"GET /a HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()
    assert origin.heads == [
        b"GET /a HTTP/1.1\r\nHost: allowed.example\r\nConnection: close\r\n\r\n"
    ]
