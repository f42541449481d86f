"""Requests that two parsers could understand differently are refused."""

import random

import h11
import pytest
from anyio import fail_after

from sandbox_runtime.egress.decision import DeniedError
from sandbox_runtime.egress.http1 import CHUNKED, parse_request_head
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import Internet, Origin
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client

START = b"POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: allowed.example\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        START + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        START + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        START + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        START + b"Content-Length: 5, 5\r\n\r\nhello",
        START + b"Content-Length: +5\r\n\r\nhello",
        START + b"Content-Length: -5\r\n\r\nhello",
        START + b"Content-Length: 0x5\r\n\r\nhello",
        START + b"Content-Length: 5 \t5\r\n\r\nhello",
        START + b"Content-Length: \r\n\r\n",
        START + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
        START + b"Content-Length : 5\r\n\r\nhello",
        START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding: identity\r\n\r\n",
        START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding\x00: chunked\r\n\r\n0\r\n\r\n",
        START + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
        START + b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"X: y\x00\r\n\r\n",
        START + b": y\r\n\r\n",
        START + b"no colon\r\n\r\n",
        START.replace(b"\r\n", b"\n") + b"\n",
        START + b"\n",
        b"\r\n" + START + b"\r\n",
        START.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        START.replace(b"1.1", b"2.0") + b"\r\n",
        START.replace(b"1.1", b"1.1 ") + b"\r\n",
        START.replace(b" http", b"  http") + b"\r\n",
        START.replace(b" http", b"\thttp") + b"\r\n",
        START.replace(b"POST", b"PO ST") + b"\r\n",
        START.replace(b"POST", b"") + b"\r\n",
        START.replace(b"POST", b"TRACE") + b"\r\n",
        START.replace(b"POST", b"Trace") + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        START + b"X: y\r\n" * 200 + b"\r\n",
        START + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
        b"GET http://allowed.example/" + b"a" * 40_000,
    ],
    ids=lambda sent: repr(sent[-60:]),
)
async def test_ambiguous_request_is_refused_before_dialing(
    request_bytes: bytes,
) -> None:
    internet = Internet()
    async with gateway_client(allowlist("allowed.example"), internet) as sandbox:
        with fail_after(5):
            answer = await sandbox.exchange(request_bytes)
            decision = await sandbox.only_decision()
    assert answer.split(b" ", 2)[1] in (b"400", b"405")
    assert decision.verdict == "denied"
    assert internet.lookups == internet.dialed == []


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"-1\r\n\r\n",
        b"\r\n\r\n",
        b"fffffffff\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"5;" + b"a" * 5000 + b"\r\n",
        b"0\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"0\r\nX: " + b"y" * 5000 + b"\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:20]),
)
async def test_server_never_sees_the_end_of_a_malformed_body(body: bytes) -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            answer = await sandbox.exchange(START + b"Transfer-Encoding: chunked\r\n\r\n" + body)
            await until(lambda: origin.cut == 1)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request: ")
    assert origin.bodies == []


async def test_server_never_sees_the_end_of_an_incomplete_body() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.open()
            writer.write(START + b"Content-Length: 9\r\n\r\nhello")
            writer.write_eof()
            assert b"the body ends in its middle" in await reader.read()
            await until(lambda: origin.cut == 1)
            writer.close()


async def test_bytes_after_the_body_are_not_relayed() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            await sandbox.exchange(START + b"Content-Length: 5\r\n\r\nhello" + SMUGGLED)
            await sandbox.exchange(START + b"\r\n" + SMUGGLED)
    assert len(origin.heads) == 2
    assert origin.bodies == [b"hello", b""]


async def test_headers_that_servers_may_confuse_are_not_relayed() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            await sandbox.exchange(
                START + b"Content_Length: 99\r\nTransfer_Encoding: chunked\r\n"
                b"Connection: close, content-length, host\r\nContent-Length: 2\r\n\r\nhi"
            )
    assert origin.heads == [
        b"POST / HTTP/1.1\r\nHost: allowed.example\r\n"
        b"Content-Length: 2\r\nConnection: close\r\n\r\n"
    ]
    assert origin.bodies == [b"hi"]


SEEDS = [
    START + framing + b"Accept: */*\r\nConnection: x, y\r\nUser-Agent: a (b; c)\r\n\r\n"
    for framing in (
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    )
]
PIECES = (
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b":",
        b",",
        b"@",
        b"\x00",
        b"\xff",
        b"chunked",
    ),
    *(b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: evil.example\r\n"),
)


def test_h11_reads_every_accepted_request_as_the_gateway_does() -> None:
    dice = random.Random(20260116)
    passed = 0
    for _ in range(20_000):
        head = bytearray(dice.choice(SEEDS))
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(head))
            end = at + dice.choice((0, 0, 1, 1, 8, 30))
            head[at:end] = dice.choice((*PIECES, bytes((dice.randrange(256),)), b""))
        head = head[: head.find(b"\r\n\r\n") + 4]
        try:
            parsed = parse_request_head(bytes(head))
            target = parsed.target()
            parsed.check_host(target)
        except DeniedError:
            continue
        passed += 1
        other = h11.Connection(h11.SERVER)
        other.receive_data(parsed.rewritten_head(target, ()))
        event = other.next_event()
        assert isinstance(event, h11.Request)
        hosts = [value for name, value in event.headers if name == b"host"]
        assert hosts == [str(target).removesuffix(":80").encode()]
        coding = [value for name, value in event.headers if name == b"transfer-encoding"]
        length = [value for name, value in event.headers if name == b"content-length"]
        if parsed.body_bytes == CHUNKED:
            assert (coding, length) == ([b"chunked"], [])
        else:
            assert (coding, length or [b"0"]) == ([], [b"%d" % parsed.body_bytes])
    assert passed > 1000
