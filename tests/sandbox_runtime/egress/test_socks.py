"""The gateway's rules apply to SOCKS 5 requests."""

import random
import ssl

import pytest
from anyio import fail_after

from policies.egress import Egress
from sandbox_runtime.egress.limits import Timeouts
from tests.sandbox_runtime.egress.internet import (
    PUBLIC,
    Internet,
    Reader,
    Writer,
    client_tls_context,
    echo,
)
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client

HELLO = b"\x05\x01\x00"
CHOSEN = b"\x05\x00"
PUBLIC_BYTES = bytes(map(int, PUBLIC.split(".")))


def connect(host: bytes, port: int = 443, command: int = 1) -> bytes:
    return bytes((5, command, 0)) + host + port.to_bytes(2, "big")


def name(text: str) -> bytes:
    return bytes((3, len(text.encode()))) + text.encode()


def reply(code: int) -> bytes:
    return bytes((5, code, 0, 1)) + bytes(6)


@pytest.mark.parametrize(
    ("allow", "host"),
    [
        ("allowed.example:7", name("Allowed.EXAMPLE.")),
        (f"{PUBLIC}:7", b"\x01" + PUBLIC_BYTES),
        (f"{PUBLIC}:7", name(PUBLIC)),
        ("[2606:4700::1111]:7", b"\x04" + bytes.fromhex("26064700000000000000000000001111")),
        ("[2606:4700::1111]:7", name("[2606:4700:0:0::1111]")),
    ],
)
async def test_tunnel_relays_other_protocols_to_a_port_with_a_rule(allow: str, host: bytes) -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=7),
        internet.server(echo, ip="2606:4700::1111", port=7),
        gateway_client(allowlist(allow), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.socks(host, 7)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            decision = await sandbox.only_decision()
    assert (decision.verdict, decision.reason) == ("allowed", "")
    assert (decision.bytes_up, decision.bytes_down) == (5, 5)


async def test_data_of_a_server_that_speaks_first_arrives() -> None:
    internet = Internet()

    async def greet(reader: Reader, writer: Writer) -> None:
        writer.write(b"220 ready\r\n")
        await reader.read()

    async with (
        internet.server(greet, port=25),
        gateway_client(allowlist("allowed.example:25"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.socks(name("allowed.example"), 25)
            assert await reader.readline() == b"220 ready\r\n"
            writer.close()


async def test_tls_in_a_socks_tunnel_must_name_its_host() -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=443, tls=True),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            for host in ("allowed.example", "other.example"):
                _, writer = await sandbox.socks(name("allowed.example"), 443)
                if host == "allowed.example":
                    await writer.start_tls(client_tls_context(), server_hostname=host)
                else:
                    with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                        await writer.start_tls(client_tls_context(), server_hostname=host)
                writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (connect(name("other.example")), CHOSEN + reply(2)),
        (connect(name("allowed.example"), port=22), CHOSEN + reply(2)),
        (connect(b"\x01" + PUBLIC_BYTES), CHOSEN + reply(2)),
        (connect(b"\x01\x7f\x00\x00\x01"), CHOSEN + reply(2)),
        (connect(b"\x04" + bytes(15) + b"\x01"), CHOSEN + reply(2)),
        (connect(name("2130706433")), CHOSEN + reply(2)),
        (connect(name("allowed.example\x00.other.example")), CHOSEN + reply(2)),
        (connect(b"\x03\x02\xff\xfe"), CHOSEN + reply(2)),
        (connect(b"\x03\x00"), CHOSEN + reply(2)),
        (connect(name("allowed.example"), command=2), CHOSEN + reply(7)),
        (connect(name("allowed.example"), command=3), CHOSEN + reply(7)),
        (connect(name("allowed.example"), port=0), CHOSEN + reply(7)),
        (connect(name("gone.example")), CHOSEN + reply(4)),
        (connect(name("allowed.example")), CHOSEN + reply(4)),
        (b"\x05\x01\x00\x02allowed.example", CHOSEN + reply(1)),
        (b"\x04\x01\x00\x01", CHOSEN + reply(1)),
    ],
    ids=repr,
)
async def test_refused_socks_request_gets_a_socks_reply(sent: bytes, answer: bytes) -> None:
    internet = Internet()
    async with gateway_client(allowlist("allowed.example", "gone.example"), internet) as sandbox:
        with fail_after(5):
            assert await sandbox.exchange(HELLO, sent) == answer


async def test_socks_greeting_without_the_no_authentication_method_is_refused() -> None:
    async with gateway_client(Egress(mode="open"), Internet()) as sandbox:
        with fail_after(5):
            assert (await sandbox.exchange(b"\x05\x02\x01\x02")).startswith(b"\x05\xff")


@pytest.mark.parametrize(
    "sent", [b"\x05", b"\x05\x02\x00", HELLO, HELLO + b"\x05\x01\x00\x03\x09a"]
)
async def test_incomplete_socks_greeting_times_out(sent: bytes) -> None:
    async with gateway_client(
        Egress(mode="open"), Internet(), timeouts=Timeouts(head_s=0.05)
    ) as sandbox:
        with fail_after(5):
            assert (await sandbox.exchange(sent)).endswith(reply(1))
            decision = await sandbox.only_decision()
    assert (decision.verdict, decision.reason) == ("denied", "no complete request within 0.05 s")


async def test_random_bytes_are_denied_as_socks_requests() -> None:
    dice = random.Random(20260119)
    internet = Internet()
    async with gateway_client(allowlist("allowed.example"), internet) as sandbox:
        with fail_after(20):
            for _ in range(300):
                reader, writer = await sandbox.open()
                writer.write(dice.choice((b"\x05", HELLO + b"\x05\x01\x00", b"")))
                writer.write(dice.randbytes(dice.randint(1, 40)))
                writer.write_eof()
                await reader.read()
                writer.close()
    assert internet.lookups == internet.dialed == []
    assert {decision.verdict for decision in sandbox.decisions} == {"denied"}
