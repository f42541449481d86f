"""TLS in a tunnel must name the host of the tunnel in its ClientHello."""

import random
import ssl
from collections.abc import Callable
from contextlib import suppress

import pytest
from anyio import fail_after

from policies.egress import Egress
from policies.hosts import Target
from sandbox_runtime.egress.connection import BufferedReader
from sandbox_runtime.egress.decision import DeniedError
from sandbox_runtime.egress.limits import Timeouts
from sandbox_runtime.egress.tls_tunnel import read_client_hello, server_name
from tests.sandbox_runtime.egress.internet import CERTIFICATE, Internet, Reader, Writer, echo
from tests.sandbox_runtime.egress.programs import PieceConnection, allowlist, gateway_client

ACCESS_DENIED = bytes((0x15, 3, 3, 0, 2, 2, 49))


def client_hello(name: str | None, alpn: int = 0) -> bytes:
    """Return the ClientHello records of Python's TLS."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    context.set_alpn_protocols([f"protocol-{number:03}" for number in range(alpn)])
    written = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), written, server_hostname=name).do_handshake()
    return written.read()


def handshake(records: bytes) -> bytes:
    """Return the handshake message in the records, without record headers."""
    return records[5:]


def record(fragment: bytes) -> bytes:
    return b"\x16\x03\x01" + len(fragment).to_bytes(2, "big") + fragment


def message(body: bytes) -> bytes:
    return b"\x01" + len(body).to_bytes(3, "big") + body


def vector(length_bytes: int, content: bytes) -> bytes:
    return len(content).to_bytes(length_bytes, "big") + content


def extension(kind: int, content: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(2, content)


def names(*entries: bytes) -> bytes:
    return extension(0, vector(2, b"".join(entries)))


def name_entry(name: bytes, kind: int = 0) -> bytes:
    return bytes((kind,)) + vector(2, name)


def made(*extensions: bytes, tail: bytes = b"") -> bytes:
    """Return the body of a ClientHello with these extensions."""
    start = b"\x03\x03" + bytes(32) + b"\x00" + vector(2, b"\x13\x01") + b"\x01\x00"
    return start + vector(2, b"".join(extensions)) + tail


OURS = names(name_entry(b"allowed.example"))


async def test_tls_for_the_tunnels_host_passes_both_ways() -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=443, tls=True),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect_tls("ALLOWED.example.:443", "allowed.example")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            decision = await sandbox.only_decision()
    assert (decision.host, decision.port) == ("allowed.example", 443)
    assert (decision.verdict, decision.reason) == ("allowed", "")
    assert decision.bytes_up > 200
    assert decision.bytes_down > 200


@pytest.mark.parametrize("egress", [allowlist("allowed.example"), Egress(mode="open")])
async def test_tls_for_another_host_is_refused(egress: Egress) -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=443, tls=True),
        gateway_client(egress, internet) as sandbox,
    ):
        with fail_after(5):
            with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                await sandbox.connect_tls("allowed.example:443", "other.example")
            decision = await sandbox.only_decision()
    assert decision.verdict == "denied"
    assert decision.reason == (
        "TLS names the server other.example in a connection to allowed.example"
    )
    assert decision.bytes_up == 0


async def test_tls_server_name_must_match_the_target_on_ports_other_than_443() -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=8443, tls=True),
        gateway_client(allowlist("allowed.example:8443"), internet) as sandbox,
    ):
        with fail_after(5):
            with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                await sandbox.connect_tls("allowed.example:8443", "other.example")
            _, writer = await sandbox.connect_tls("allowed.example:8443", "allowed.example")
            writer.close()


async def test_tls_to_an_ip_address_passes_only_without_a_server_name() -> None:
    internet = Internet()
    ip = "93.184.215.14"
    async with (
        internet.server(echo, port=443, tls=True),
        gateway_client(allowlist(ip), internet) as sandbox,
    ):
        with fail_after(5):
            for hello, passes in (
                (client_hello(None), True),
                (client_hello("allowed.example"), False),
            ):
                reader, writer = await sandbox.connect(f"{ip}:443")
                writer.write(hello)
                assert (await reader.readexactly(7) != ACCESS_DENIED) is passes
                writer.close()
    assert internet.lookups == []


HIDING = {
    "no name": record(message(made())),
    "ECH": record(message(made(OURS, extension(0xFE0D, b"\x00")))),
    "ESNI": record(message(made(OURS, extension(0xFFCE, b"\x00")))),
    "two lists of names": record(message(made(OURS, OURS))),
    "an empty list": record(message(made(names()))),
    "an empty name": record(message(made(names(name_entry(b""))))),
    "another kind of name": record(message(made(names(name_entry(b"allowed.example", kind=1))))),
    "two names": record(message(made(names(name_entry(b"allowed.example"), name_entry(b"e.e"))))),
    "a NUL": record(message(made(names(name_entry(b"allowed.example\x00.e.example"))))),
    "not ASCII": record(message(made(names(name_entry(b"b\xfccher.example"))))),
    "bytes after the name": record(message(made(names(name_entry(b"allowed.example") + b"x")))),
    "bytes after the extensions": record(message(made(OURS, tail=b"x"))),
    "an extension cut short": record(message(made(OURS)[:-1])),
    "bytes after the message": record(message(made(OURS)) + b"x"),
    "two messages": record(message(made(OURS)) + message(made(OURS))),
    "a name after the message": record(message(made()[:-2]) + vector(2, OURS)),
    "an empty message": record(message(b"")),
    "another message": record(b"\x02\x00\x00\x00"),
    "an empty record": record(b""),
    "a record too long": b"\x16\x03\x01\x40\x01",
    "another version": b"\x16\x02\x01\x00\x05hello",
    "another record in between": record(b"\x01\x00\x00\x10") + b"\x17\x03\x03\x00\x01x",
    "no end": record(b"\x01\xff\xff\xff") + record(bytes(16 << 10)) * 3,
}
PLAIN = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH\r\n",
    "SSL 2": b"\x80\x2e\x01\x03\x01\x00\x15",
}


@pytest.mark.parametrize("sent", [*HIDING.values(), *PLAIN.values()], ids=[*HIDING, *PLAIN])
async def test_client_hello_that_hides_its_host_on_port_443_is_denied(sent: bytes) -> None:
    internet = Internet()
    received: list[bytes] = []

    async def listen(reader: Reader, _writer: Writer) -> None:
        received.append(await reader.read())

    async with (
        internet.server(listen, port=443),
        gateway_client(Egress(mode="open"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect("allowed.example:443")
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            decision = await sandbox.only_decision()
    if sent in HIDING.values():
        assert answer == ACCESS_DENIED
    else:
        assert answer.startswith(b"HTTP/1.1 403 Forbidden: only TLS passes to port 443\r\n")
    assert decision.verdict == "denied"
    assert b"".join(received) == b""


@pytest.mark.parametrize("sent", [b"", b"\x16", client_hello("allowed.example")[:-1]], ids=len)
async def test_missing_or_incomplete_client_hello_times_out(sent: bytes) -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=443),
        gateway_client(Egress(mode="open"), internet, timeouts=Timeouts(head_s=0.05)) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect("allowed.example:443")
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()
            decision = await sandbox.only_decision()
    assert decision.verdict == "denied"


CUTS: dict[str, Callable[[bytes], list[bytes]]] = {
    "bytes": lambda hello: [bytes((byte,)) for byte in hello],
    "records of one byte": lambda hello: [
        b"".join(record(bytes((byte,))) for byte in handshake(hello))
    ],
    "records of uneven size": lambda hello: [
        record(handshake(hello)[:3]),
        record(handshake(hello)[3:50]) + record(handshake(hello)[50:90])[:2],
        record(handshake(hello)[50:90])[2:] + record(handshake(hello)[90:]),
    ],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
async def test_client_hello_is_read_in_arbitrary_pieces(
    cut: Callable[[bytes], list[bytes]],
) -> None:
    pieces = cut(client_hello("allowed.example"))
    whole = b"".join(pieces)
    reader = BufferedReader(PieceConnection([*pieces, b"more"]))
    assert await read_client_hello(reader, Target("allowed.example", 443)) == whole
    assert await reader.read(10) == b"more"


async def test_client_hello_of_many_kilobytes_is_read() -> None:
    hello = client_hello("allowed.example", alpn=900)
    assert len(hello) > 10_000
    assert (
        await read_client_hello(
            BufferedReader(PieceConnection([hello])), Target("allowed.example", 443)
        )
        == hello
    )


def name_that_openssl_sees(hello: bytes) -> str | None:
    """Return the server name that OpenSSL reads. Raises ssl.SSLError if OpenSSL refuses the
    hello."""
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    context.sni_callback = lambda _socket, name, _context: seen.append(name)
    arrived = ssl.MemoryBIO()
    arrived.write(hello)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(arrived, ssl.MemoryBIO(), server_side=True).do_handshake()
    return seen[0]


def test_openssl_reads_the_same_server_name_from_every_accepted_client_hello() -> None:
    dice = random.Random(20260117)
    seeds = [handshake(client_hello("allowed.example"))[4:], made(OURS)]
    compared = 0
    for _ in range(3000):
        body = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(0, 2)):
            at, length = dice.randrange(len(body)), dice.choice((0, 1, 1, 1, 4))
            body[at : at + length] = dice.randbytes(dice.choice((length, length, 1)))
        with suppress(DeniedError, ssl.SSLError):
            name = server_name(bytes(body))
            assert name_that_openssl_sees(record(message(bytes(body)))) == name
            compared += 1
    assert compared > 300


async def test_random_bytes_are_denied_as_client_hello() -> None:
    dice = random.Random(20260118)
    for _ in range(3000):
        body = dice.randbytes(dice.randint(0, 60))
        sent = [dice.choice((record(body), record(message(body)), b"\x16" + body))]
        with pytest.raises(DeniedError):
            await read_client_hello(
                BufferedReader(PieceConnection(sent)), Target("allowed.example", 443)
            )
