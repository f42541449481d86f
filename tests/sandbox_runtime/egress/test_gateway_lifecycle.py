"""The end of connections and gateways leaves no open connection."""

import asyncio
import socket
import struct
from contextlib import suppress

import anyio
import pytest
from anyio import fail_after

from policies.egress import Egress
from sandbox_runtime.egress.decision import Decision
from sandbox_runtime.egress.dialer import Server
from sandbox_runtime.egress.gateway import Gateway
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer, echo
from tests.sandbox_runtime.egress.programs import (
    PieceConnection,
    allowlist,
    gateway_client,
    serve_programs,
)

HOST = "allowed.example:7"
OPEN = f"CONNECT {HOST} HTTP/1.1\r\n\r\n".encode()


class Host:
    """A server that counts its open connections."""

    def __init__(self) -> None:
        self.open = 0
        self.got = b""

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.open += 1
        try:
            while data := await reader.read(1 << 16):
                self.got += data
                writer.write(data)
                await writer.drain()
        finally:
            self.open -= 1


async def test_closing_the_gateway_ends_connections_at_every_step() -> None:
    internet, host = Internet({"allowed.example": ["93.184.215.14"]}), Host()
    waiting: list[str] = []

    async def resolve(name: str) -> list[str]:
        if name == "slow.example":
            waiting.append(name)
            await asyncio.Event().wait()
        return list(await internet.resolve(name))

    async def connect(ip: str, port: int) -> Server:
        if port == 9:
            waiting.append(ip)
            await asyncio.Event().wait()
        return await internet.connect(ip, port)

    decisions: list[Decision] = []
    gateway = Gateway(
        Egress(mode="open"), resolve=resolve, connect=connect, on_decision=decisions.append
    )
    before = asyncio.all_tasks()
    async with internet.server(host, port=7), serve_programs(gateway, decisions) as sandbox:
        with fail_after(5):
            readers = [(await sandbox.connect(HOST))[0]]
            slow = b"CONNECT slow.example:7 HTTP/1.1\r\n\r\n"
            for sent in (b"", b"GET ", slow, OPEN.replace(b":7", b":9")):
                reader, writer = await sandbox.open()
                writer.write(sent)
                readers.append(reader)
            await until(lambda: len(waiting) == 2)
            await gateway.aclose()
            await gateway.aclose()
            for reader in readers:
                assert await reader.read() == b""
            await until(lambda: host.open == 0)
            await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
            with suppress(ConnectionResetError):
                assert await sandbox.exchange(OPEN) == b""
    assert len(decisions) == 6
    assert {decision.reason for decision in decisions} == {"the sandbox ended"}


async def test_connection_to_the_host_is_closed_when_the_program_aborts_its_connection() -> None:
    internet, host = Internet(), Host()
    async with internet.server(host, port=7), gateway_client(allowlist(HOST), internet) as sandbox:
        with fail_after(5):
            reader, writer = await sandbox.connect(HOST)
            writer.write(b"hello")
            await reader.readexactly(5)
            writer.transport.abort()
            decision = await sandbox.only_decision()
            await until(lambda: host.open == 0)
    assert (decision.verdict, decision.reason) == ("allowed", "")


async def test_program_reset_before_the_response_closes_the_connection_to_the_host() -> None:
    internet, host = Internet(), Host()

    async def mute(reader: Reader, writer: Writer) -> None:
        host.open += 1
        while await reader.read(1 << 16):
            pass
        host.open -= 1

    async with (
        internet.server(mute),
        gateway_client(allowlist("allowed.example"), internet) as sandbox,
    ):
        with fail_after(5):
            _, writer = await sandbox.open()
            writer.write(b"GET http://allowed.example/ HTTP/1.0\r\n\r\n")
            await until(lambda: host.open == 1)
            reset(writer)
            await until(lambda: host.open == 0)


def reset(writer: Writer) -> None:
    """Reset a connection, as a crash does."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_program_and_server_may_finish_sending_in_any_order() -> None:
    internet = Internet()

    async def send_and_close(reader: Reader, writer: Writer) -> None:
        received = await reader.read()
        writer.write(b"you said " + received)

    async def reply_once(reader: Reader, writer: Writer) -> None:
        writer.write(b"now you")
        writer.write_eof()
        received.append(await reader.read())

    received: list[bytes] = []
    async with (
        internet.server(send_and_close, port=7),
        internet.server(reply_once, port=9),
        gateway_client(allowlist(HOST, "allowed.example:9"), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect(HOST)
            writer.write(b"hello")
            writer.write_eof()
            assert await reader.read() == b"you said hello"
            reader, writer = await sandbox.connect("allowed.example:9")
            assert await reader.read() == b"now you"
            writer.write(b"hello")
            writer.write_eof()
            await until(lambda: received == [b"hello"])
            await until(lambda: len(sandbox.decisions) == 2)
    assert {decision.reason for decision in sandbox.decisions} == {""}


async def test_connection_reset_by_the_host_is_reported() -> None:
    internet = Internet()

    async def breaking(reader: Reader, writer: Writer) -> None:
        await reader.readexactly(5)
        reset(writer)

    async with (
        internet.server(breaking, port=7),
        gateway_client(allowlist(HOST), internet) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect(HOST)
            writer.write(b"hello")
            assert await reader.read() == b""
            decision = await sandbox.only_decision()
    assert decision.verdict == "allowed"
    assert decision.reason.startswith("the host broke the connection: ")


async def test_cancelled_serving_task_closes_both_sides_of_the_connection() -> None:
    internet, host = Internet(), Host()
    async with internet.server(host, port=7), gateway_client(allowlist(HOST), internet) as sandbox:
        with fail_after(5):
            reader, _ = await sandbox.connect(HOST)
            sandbox.tasks[0].cancel()
            assert await reader.read() == b""
            await until(lambda: host.open == 0)


async def test_egress_gateway_awaits_an_asynchronous_decision_callback() -> None:
    internet = Internet()
    reported: list[str] = []

    async def listen(decision: Decision) -> None:
        await anyio.lowlevel.checkpoint()
        reported.append(decision.verdict)

    gateway = Gateway(Egress(), resolve=internet.resolve, on_decision=listen)
    async with serve_programs(gateway, []) as sandbox:
        with fail_after(5):
            await sandbox.exchange(OPEN)
            await gateway.aclose()
    assert reported == ["denied"]


class SilentConnection(PieceConnection):
    """A Connection whose program sends nothing."""

    aborted = False

    async def receive(self) -> bytes:
        return await asyncio.Future()

    def abort(self) -> None:
        self.aborted = True


async def test_egress_gateway_reports_a_decision_when_serving_is_cancelled() -> None:
    reported: list[str] = []

    async def listen(decision: Decision) -> None:
        await anyio.lowlevel.checkpoint()
        reported.append(decision.reason)

    gateway = Gateway(Egress(), resolve=Internet().resolve, on_decision=listen)
    connection = SilentConnection([])
    with fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(gateway.serve, connection)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert reported == ["the sandbox ended"]
    assert connection.aborted


async def test_data_in_flight_to_a_slow_host_arrives() -> None:
    internet, reads = Internet(), asyncio.Event()
    arrived: list[bytes] = []

    async def slow(reader: Reader, writer: Writer) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write_eof()
        await reads.wait()
        writer.transport.resume_reading()
        arrived.append(await reader.read())

    async def narrow(ip: str, port: int) -> Server:
        reader, writer = await internet.connect(ip, port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return reader, writer

    async with (
        internet.server(slow, port=7),
        gateway_client(allowlist(HOST), internet, connect=narrow) as sandbox,
    ):
        with fail_after(10):
            reader, writer = await sandbox.connect(HOST)
            writer.write(bytes(60_000))
            writer.write_eof()
            assert await reader.read() == b""
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            reads.set()
            await until(lambda: bool(arrived))
    assert len(arrived[0]) == 60_000


@pytest.mark.parametrize("connections", [200])
async def test_concurrent_connections_get_their_own_answers(connections: int) -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=7),
        gateway_client(allowlist(HOST, max_connections=connections), internet) as sandbox,
    ):
        with fail_after(20):
            tunnels = [await sandbox.connect(HOST) for _ in range(connections)]
            for number, (_, writer) in enumerate(tunnels):
                writer.write(b"%d" % number)
                writer.write_eof()
            answers = [await reader.read() for reader, _ in tunnels]
    assert answers == [b"%d" % number for number in range(connections)]
