"""Plain HTTP through the gateway: one rewritten request per connection, to the host of its URL."""

import pytest
from anyio import fail_after

from policies.egress import Egress
from sandbox_runtime.egress.decision import Decision
from tests.sandbox_runtime.egress.internet import PUBLIC, Internet, Origin, Reader, Writer
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client

GET = b"GET http://allowed.example/a?b HTTP/1.1\r\nHost: allowed.example\r\n"


async def test_proxy_request_is_sent_to_its_host_in_origin_form() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            answer = await sandbox.exchange(
                GET,
                b"Accept: */*\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: eA==\r\n"
                b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nUpgrade: h2c\r\n"
                b"TE: trailers\r\nX-End: 2\r\n\r\n",
            )
            decision = await sandbox.only_decision()
    seen = (
        b"GET /a?b HTTP/1.1\r\nHost: allowed.example\r\nAccept: */*\r\nX-End: 2\r\n"
        b"Connection: close\r\n\r\n"
    )
    assert origin.heads == [seen]
    assert answer == (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(seen) + seen
    )
    assert decision == Decision(
        host="allowed.example",
        port=80,
        verdict="allowed",
        reason="",
        bytes_up=len(seen),
        bytes_down=len(answer),
        duration_s=decision.duration_s,
    )


async def test_denied_host_is_refused_with_a_reason_and_never_resolved() -> None:
    internet = Internet()
    async with gateway_client(allowlist("pypi"), internet) as sandbox:
        with fail_after(5):
            answer = await sandbox.exchange(b"GET http://example.com/ HTTP/1.0\r\n\r\n")
            decision = await sandbox.only_decision()
    words = (
        "host example.com is not in this sandbox's allowlist"
        " (allowed: pypi.org, files.pythonhosted.org)"
    )
    head, body = answer.decode().split("\r\n\r\n")
    assert body == words + "\n"
    assert head.splitlines()[0] == f"HTTP/1.1 403 Forbidden: {words}"
    assert internet.lookups == internet.dialed == []
    assert (decision.verdict, decision.reason) == ("denied", words)
    assert (decision.host, decision.port) == ("example.com", 80)
    assert decision.bytes_up == decision.bytes_down == 0


async def test_refusal_reaches_a_program_that_still_sends_its_body() -> None:
    async with gateway_client(allowlist("pypi"), Internet()) as sandbox:
        with fail_after(5):
            post = b"POST http://example.com/ HTTP/1.0\r\nContent-Length: 9999999\r\n\r\n"
            assert (await sandbox.exchange(post, bytes(9_999_999))).startswith(b"HTTP/1.1 403 ")


async def test_sandbox_without_network_is_denied_every_host() -> None:
    async with gateway_client(Egress(), Internet()) as sandbox:
        with fail_after(5):
            assert (await sandbox.exchange(GET, b"\r\n")).endswith(b"this sandbox has no network\n")


@pytest.mark.parametrize(
    ("framing", "body", "seen"),
    [
        (b"Content-Length: 5\r\n\r\n", [b"hello"], b"hello"),
        (b"Content-Length: 5\r\n\r\n", [b"he", b"ll", b"o"], b"hello"),
        (b"Content-Length: 0\r\n\r\n", [], b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", [b"5\r\nhello\r\n0\r\n\r\n"], b"hello"),
        (
            b"Transfer-Encoding: Chunked\r\n\r\n",
            [b"3;x=y\r\nhel\r", b"\n2\r\nlo\r\n0\r\n\r\n"],
            b"hello",
        ),
        (b"Transfer-Encoding: chunked\r\n\r\n", [b"05\r\nhello\r\n0\r\nX: y\r\n\r\n"], b"hello"),
    ],
    ids=str,
)
async def test_request_body_arrives_complete(
    framing: bytes, body: list[bytes], seen: bytes
) -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            post = GET.replace(b"GET", b"POST")
            assert (await sandbox.exchange(post + framing, *body)).startswith(b"HTTP/1.1 200 ")
    assert origin.bodies == [seen]


async def test_only_the_first_of_several_requests_on_a_connection_is_answered() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            answer = await sandbox.exchange(GET + b"\r\n" + GET.replace(b"/a?b", b"/c") + b"\r\n")
    assert len(origin.heads) == 1
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"\r\nConnection: close\r\n" in answer


async def test_a_request_to_another_port_needs_a_rule_for_it() -> None:
    internet, origin = Internet(), Origin()
    url = GET.replace(b"allowed.example", b"allowed.example:8080")
    async with internet.server(origin, port=8080):
        async with gateway_client(allowlist("allowed.example"), internet) as sandbox:
            with fail_after(5):
                assert b"port 8080 of host allowed.example" in await sandbox.exchange(url, b"\r\n")
        async with gateway_client(allowlist("allowed.example:8080"), internet) as sandbox:
            with fail_after(5):
                assert (await sandbox.exchange(url, b"\r\n")).startswith(b"HTTP/1.1 200 ")
    assert b"\r\nHost: allowed.example:8080\r\n" in origin.heads[0]


async def test_interim_responses_are_relayed_before_the_response() -> None:
    internet = Internet()

    async def slow(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(2) == b"ok"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: 9\r\n\r\nthanks")

    async with (
        internet.server(slow),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.open()
            writer.write(
                GET.replace(b"GET", b"PUT") + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            )
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"ok")
            assert await reader.read() == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthanks"
            writer.close()


async def test_response_sent_before_the_body_was_read_is_relayed() -> None:
    internet = Internet()

    async def impatient(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with (
        internet.server(impatient),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.open()
            writer.write(GET.replace(b"GET", b"PUT") + b"Content-Length: 99999999\r\n\r\nsome")
            head = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            assert await reader.read() == head
            writer.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ],
    ids=lambda answer: answer[:40],
)
async def test_non_http_response_is_reported_as_bad_gateway(answer: bytes) -> None:
    internet = Internet()

    async def odd(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async with (
        internet.server(odd),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            assert (await sandbox.exchange(GET, b"\r\n")).startswith(
                b"HTTP/1.1 502 Bad Gateway: the host"
            )
            decision = await sandbox.only_decision()
    assert decision.verdict == "allowed"
    assert decision.reason.startswith("the host")


async def test_unreachable_host_is_reported_to_the_program() -> None:
    internet = Internet({"allowed.example": [PUBLIC]})
    async with gateway_client(allowlist("allowed.example", "gone.example"), internet) as sandbox:
        with fail_after(5):
            assert b"cannot connect to allowed.example:80: Conn" in await sandbox.exchange(
                GET, b"\r\n"
            )
            gone = GET.replace(b"allowed", b"gone")
            assert b"cannot resolve gone.example: Name or" in await sandbox.exchange(gone, b"\r\n")
    assert {decision.verdict for decision in sandbox.decisions} == {"allowed"}
