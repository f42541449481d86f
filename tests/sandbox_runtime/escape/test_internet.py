"""The end of the fake internet."""

import asyncio
import socket

from sandbox_runtime.escape.internet import PUBLIC, FakeInternet


async def test_pending_connections_are_accepted_before_the_fake_internet_closes() -> None:
    internet = FakeInternet()
    async with internet.running_server():
        _, writer = await internet.connect(PUBLIC, 80)
        late = socket.create_connection(writer.get_extra_info("peername"))
        writer.close()
    reader, writer = await asyncio.open_connection(sock=late)
    assert await reader.read() == b""  # hung up on in good order: else its connection is reset
    writer.close()
