import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.http_server import MAX_HELD_BYTES, CoalescingTransport

PIECES = 200


class Writer(asyncio.Protocol):
    """Who writes, and is told when to wait."""

    def __init__(self) -> None:
        self.must_wait = False

    def pause_writing(self) -> None:
        self.must_wait = True


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[CoalescingTransport, Writer, socket.socket]]:
    """A transport, its protocol, and the other end."""
    here, there = socket.socketpair()
    there.setblocking(False)
    transport, writer = await asyncio.get_running_loop().create_connection(Writer, sock=here)
    with there:
        yield CoalescingTransport(transport), writer, there
        transport.abort()


async def received(there: socket.socket, count: int) -> bytes:
    """So many bytes, or all up to the end."""
    data = bytearray()
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(there, count - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


async def test_nothing_is_sent_before_the_turn_is_over_and_then_all_in_order() -> None:
    async with connected() as (transport, _, there):
        transport.write(b"head, ")
        transport.write(b"body")
        with pytest.raises(BlockingIOError):
            there.recv(1, socket.MSG_PEEK)
        assert await asyncio.get_running_loop().sock_recv(there, 100) == b"head, body"
        transport.write(b"more")
        assert await received(there, 4) == b"more"


async def test_who_writes_without_ever_waiting_is_told_to_wait() -> None:
    async with connected() as (transport, writer, there):
        pieces = [b"%d" % n * (MAX_HELD_BYTES // 8) for n in range(PIECES)]
        for piece in pieces:
            transport.write(piece)
        assert writer.must_wait
        whole = b"".join(pieces)
        assert await received(there, len(whole)) == whole


async def test_what_was_written_before_the_end_arrives() -> None:
    async with connected() as (transport, _, there):
        transport.write(b"last ")
        transport.write(b"words")
        transport.close()
        assert transport.is_closing()
        assert await received(there, 100) == b"last words"


async def test_after_the_end_nothing_is_sent() -> None:
    async with connected() as (transport, _, there):
        transport.write(b"said")
        transport.close()
        transport.write(b"too late")
        assert await received(there, 100) == b"said"
