"""A guest whose agent is played by the test, at the other end of a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.backends.byte_stream import ByteStreamProtocol
from sandbox_runtime.channel import Channel
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import HELLO, VERSION, json_frame


class SocketGuest:
    """The host's end of the socket."""

    id = "socket"

    def __init__(self, byte_stream: ByteStreamProtocol) -> None:
        self.byte_stream = byte_stream

    @property
    def queued_bytes(self) -> int:
        """Return the number of bytes that wait for the agent, without the kernel's buffers."""
        return self.byte_stream._transport.get_write_buffer_size()

    @property
    def has_room(self) -> bool:
        return self.byte_stream._writable.is_set()

    async def receive(self, on_data: DataCallback) -> None:
        await self.byte_stream.receive(on_data)

    async def drain(self) -> None:
        await self.byte_stream.drain()

    def write(self, data: bytes) -> None:
        self.byte_stream.write(data)

    def write_control(self, data: bytes) -> None:
        self.byte_stream.write_control(data)

    async def kill(self) -> None:
        self.byte_stream.abort()

    async def resize(self, isolation: Isolation) -> None:
        raise SandboxStartError("a socket has no limits")

    def limit_events(self) -> None:
        return None

    def reference(self) -> None:
        return None

    def diagnostics(self) -> str:
        return ""


@asynccontextmanager
async def socket_sandbox() -> AsyncIterator[tuple[GuestSandbox, SocketGuest, socket.socket]]:
    """Yield a sandbox whose agent has sent HELLO, and the agent's end of the socket."""
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    connect = asyncio.get_running_loop().create_unix_connection
    _, byte_stream = await connect(ByteStreamProtocol, sock=ours)
    guest = SocketGuest(byte_stream)
    channel = Channel(guest)
    with peer, anyio.fail_after(20):
        peer.send(json_frame(0, HELLO, {"version": VERSION}))
        await channel.connect(timeout_s=5)
        sandbox = GuestSandbox(channel)
        try:
            yield sandbox, guest, peer
        finally:
            await sandbox.close()
