"""Writes of the transport that sends those of one event loop iteration together."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.http_server import MAX_HELD_BYTES, CoalescingTransport

PIECES = 200


class Writer(asyncio.Protocol):
    """A protocol that records whether its transport has paused it."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause_writing(self) -> None:
        self.is_paused = True


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[CoalescingTransport, Writer, socket.socket]]:
    """Yield a transport, its protocol, and the peer's socket."""
    own, peer = socket.socketpair()
    peer.setblocking(False)
    transport, writer = await asyncio.get_running_loop().create_connection(Writer, sock=own)
    with peer:
        yield CoalescingTransport(transport), writer, peer
        transport.abort()


async def received(peer: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or fewer if the connection ends."""
    data = bytearray()
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(peer, count - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


async def test_writes_of_one_event_loop_iteration_are_sent_together_and_in_order() -> None:
    async with connected() as (transport, _, peer):
        transport.write(b"head, ")
        transport.write(b"body")
        with pytest.raises(BlockingIOError):
            peer.recv(1, socket.MSG_PEEK)
        assert await asyncio.get_running_loop().sock_recv(peer, 100) == b"head, body"
        transport.write(b"more")
        assert await received(peer, 4) == b"more"


async def test_writer_is_paused_if_the_peer_does_not_keep_up() -> None:
    async with connected() as (transport, writer, peer):
        pieces = [b"%d" % n * (MAX_HELD_BYTES // 8) for n in range(PIECES)]
        for piece in pieces:
            transport.write(piece)
        assert writer.is_paused
        whole = b"".join(pieces)
        assert await received(peer, len(whole)) == whole


async def test_close_sends_buffered_writes() -> None:
    async with connected() as (transport, _, peer):
        transport.write(b"last ")
        transport.write(b"words")
        transport.close()
        assert transport.is_closing()
        assert await received(peer, 100) == b"last words"


async def test_write_after_close_is_not_sent() -> None:
    async with connected() as (transport, _, peer):
        transport.write(b"said")
        transport.close()
        transport.write(b"too late")
        assert await received(peer, 100) == b"said"
