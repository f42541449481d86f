"""Our end of a byte stream, with a socket at the other."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from sandbox_runtime.backends.duplex import Duplex
from sandbox_runtime.protocol import ProtocolError

MEGABYTE = 1 << 20


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Duplex, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    connect = asyncio.get_running_loop().create_unix_connection
    transport, duplex = await connect(Duplex, sock=ours)
    with theirs, anyio.fail_after(20):
        yield duplex, theirs
    transport.abort()


async def heard(duplex: Duplex) -> bytes:
    """All that comes."""
    said = bytearray()
    await duplex.listen(said.extend)
    return bytes(said)


async def test_what_comes_before_anybody_listens_is_heard_first() -> None:
    async with connected() as (duplex, theirs):
        theirs.send(b"head\r\n\r\nearly ")
        assert await duplex.until(b"\r\n\r\n") == b"head\r\n\r\n"
        listening = asyncio.create_task(heard(duplex))
        theirs.send(b"late")
        theirs.close()
        assert await listening == b"early late"


async def test_who_talks_on_without_being_heard_is_not_read_any_more() -> None:
    async with connected() as (duplex, theirs):
        flood = asyncio.create_task(
            asyncio.get_running_loop().sock_sendall(theirs, bytes(8 * MEGABYTE))
        )
        with pytest.raises(ValueError, match="first"):
            await duplex.until(b"mark")
        listening = asyncio.create_task(heard(duplex))
        await flood
        theirs.close()
        assert len(await listening) == 8 * MEGABYTE


async def test_what_is_refused_ends_the_listening() -> None:
    def refuse(data: bytes) -> None:
        raise ProtocolError("no frame")

    async with connected() as (duplex, theirs):
        theirs.send(b"garbage")
        with pytest.raises(ProtocolError, match="no frame"):
            await duplex.listen(refuse)


async def test_one_waits_to_send_while_nobody_reads() -> None:
    async with connected() as (duplex, theirs):
        sending = asyncio.create_task(duplex.send(bytes(8 * MEGABYTE)))
        receive = asyncio.get_running_loop().sock_recv
        received = len(await receive(theirs, MEGABYTE))
        assert not sending.done()
        while received < 8 * MEGABYTE:
            received += len(await receive(theirs, MEGABYTE))
        await sending


async def test_one_cannot_send_to_nobody() -> None:
    async with connected() as (duplex, theirs):
        sending = asyncio.create_task(duplex.send(bytes(8 * MEGABYTE)))
        await asyncio.get_running_loop().sock_recv(theirs, 1)
        theirs.close()
        with pytest.raises(BrokenPipeError):
            await sending
        with pytest.raises(BrokenPipeError):
            await duplex.send(b"more")
        assert await heard(duplex) == b""


async def test_a_head_that_ends_too_early_is_none() -> None:
    async with connected() as (duplex, theirs):
        theirs.send(b"HTTP/1.1")
        theirs.close()
        with pytest.raises(ConnectionResetError):
            await duplex.until(b"\r\n\r\n")
