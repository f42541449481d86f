import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.coalescing import MAX_HELD_BYTES, CoalescingTransport

PIECES = 200


class Writer(asyncio.Protocol):
    """Who writes, and is told when to wait."""

    def __init__(self) -> None:
        self.must_wait = False

    def pause_writing(self) -> None:
        self.must_wait = True


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[CoalescingTransport, Writer, asyncio.StreamReader]]:
    """A transport, its protocol, and the other end."""
    here, there = socket.socketpair()
    reader, its_writer = await asyncio.open_connection(sock=there)
    transport, writer = await asyncio.get_running_loop().create_connection(Writer, sock=here)
    yield CoalescingTransport(transport), writer, reader
    transport.abort()
    its_writer.close()
    await its_writer.wait_closed()


async def test_what_is_written_in_one_turn_arrives_at_once_and_in_order() -> None:
    async with connected() as (transport, _, reader):
        transport.write(b"head, ")
        transport.write(b"body")
        assert await reader.read(100) == b"head, body"
        transport.write(b"more")
        assert await reader.read(100) == b"more"


async def test_who_writes_without_ever_waiting_is_told_to_wait() -> None:
    async with connected() as (transport, writer, reader):
        pieces = [b"%d" % n * (MAX_HELD_BYTES // 8) for n in range(PIECES)]
        for piece in pieces:
            transport.write(piece)
        assert writer.must_wait
        whole = b"".join(pieces)
        assert await reader.readexactly(len(whole)) == whole


async def test_what_was_written_before_the_end_arrives() -> None:
    async with connected() as (transport, _, reader):
        transport.write(b"last ")
        transport.write(b"words")
        transport.close()
        assert transport.is_closing()
        assert await reader.read() == b"last words"


async def test_a_lost_connection_takes_no_more() -> None:
    async with connected() as (transport, _, reader):
        transport.write(b"said")
        transport.close()
        transport.write(b"too late")
        assert await reader.read() == b"said"
