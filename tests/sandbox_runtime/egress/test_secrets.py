"""Injected headers reach their host and are never visible in the sandbox."""

import pytest
from anyio import fail_after

from policies.egress import BoundHeader, Egress
from sandbox_runtime.egress.gateway import Gateway
from tests.sandbox_runtime.egress.internet import PUBLIC, Internet, Origin, Reader, Writer
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client

SECRET = "s3cr3t-value"
SECRETS = {"API_KEY": SECRET}
KEY = BoundHeader("allowed.example", "X-Api-Key", "API_KEY")
GET = b"GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n"


def egress(*allow: str) -> Egress:
    return allowlist("allowed.example", "other.example", *allow, headers=(KEY,))


async def seen_by_the_host(sent: bytes) -> list[bytes]:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        internet.server(origin, port=8080),
        gateway_client(egress("allowed.example:8080"), internet, secrets=SECRETS) as sandbox,
    ):
        with fail_after(5):
            await sandbox.exchange(sent)
    (head,) = origin.heads
    return [line for line in head.split(b"\r\n") if line.lower().startswith((b"x-api", b"x_api"))]


async def test_secret_header_reaches_its_configured_host() -> None:
    assert await seen_by_the_host(GET + b"\r\n") == [b"X-Api-Key: " + SECRET.encode()]


@pytest.mark.parametrize("name", [b"X-Api-Key", b"x-api-key", b"X_API_KEY", b"X-Api_Key"])
async def test_secret_header_replaces_the_same_header_sent_by_the_program(name: bytes) -> None:
    sent = GET + name + b": forged\r\nConnection: close, X-Api-Key\r\n\r\n"
    assert await seen_by_the_host(sent) == [b"X-Api-Key: " + SECRET.encode()]


async def test_secret_header_reaches_no_other_host_or_port() -> None:
    for other in (b"other.example", b"allowed.example:8080"):
        sent = GET.replace(b"allowed.example", other) + b"X-Api-Key: mine\r\n\r\n"
        assert await seen_by_the_host(sent) == [b"X-Api-Key: mine"]


async def test_secret_header_is_added_inside_a_tunnel_to_port_80() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(egress(), internet, secrets=SECRETS) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect("allowed.example:80")
            writer.write(b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
            await reader.read()
    assert b"\r\nX-Api-Key: " + SECRET.encode() + b"\r\n" in origin.heads[0]


async def test_errors_and_decisions_do_not_contain_the_secret() -> None:
    async def nonsense(reader: Reader, writer: Writer) -> None:
        writer.write(b"nonsense\r\n\r\n")
        await reader.read()

    internet = Internet()
    answers: list[bytes] = []
    async with (
        internet.server(nonsense),
        gateway_client(egress(), internet, secrets=SECRETS) as sandbox,
    ):
        with fail_after(5):
            answers.append(await sandbox.exchange(GET + b"\r\n"))
            answers.append(await sandbox.exchange(GET.replace(b"GET", b"TRACE") + b"\r\n"))
            answers.append(await sandbox.exchange(GET + b"bad header\r\n\r\n"))
            answers.append(await sandbox.exchange(GET + b"Transfer-Encoding: chunked\r\n\r\nx"))
    assert [answer.split(b" ", 2)[1] for answer in answers] == [b"502", b"405", b"400", b"502"]
    assert SECRET.encode() not in b"".join(answers)
    assert SECRET not in repr(sandbox.decisions)
    assert len(internet.dialed) == 2
    assert internet.dialed[0] == (PUBLIC, 80)


@pytest.mark.parametrize("value", ["", "a\r\nEvil: 1", "a\x00", "\u2603"], ids=ascii)
def test_error_for_an_invalid_header_value_does_not_contain_the_value(value: str) -> None:
    with pytest.raises(ValueError, match="API_KEY holds no value") as raised:
        Gateway(egress(), resolve=Internet().resolve, secrets={"API_KEY": value})
    assert value == "" or value not in str(raised.value)


def test_secret_header_without_a_value_raises_an_error() -> None:
    with pytest.raises(ValueError, match="API_KEY holds no value"):
        Gateway(egress(), resolve=Internet().resolve)
