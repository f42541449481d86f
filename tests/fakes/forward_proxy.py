"""A forward proxy that sends every request to one server, whatever host it names, and records it.

async with forward_proxy(backend_port) as proxy:
    ...  # with HTTP_PROXY=proxy.url
assert proxy.asked == ["POST http://backend.example/v1/chat/completions"]
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class ForwardProxy:
    """A running forward proxy and its record of requests."""

    def __init__(self, port: int, refusal: bytes) -> None:
        self.url = ""
        self.asked: list[str] = []
        """Method and target of each request, as received."""
        self.authorizations: list[str] = []
        """The Proxy-Authorization headers of the requests."""
        self._port = port
        self._refusal = refusal

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """Handle one connection: a tunnel, or one request in absolute form with its response."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        line, *headers = head.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        self.asked.append(f"{method} {target}")
        named = (header.partition(": ") for header in headers)
        self.authorizations += [v for name, _, v in named if name.lower() == "proxy-authorization"]
        if self._refusal:
            writer.write(self._refusal)
            writer.close()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = "/" + target.split("/", 3)[3]
            server_writer.write(head.replace(target.encode(), path.encode(), 1))
        await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))


async def _pump(reader: Reader, writer: Writer) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def forward_proxy(port: int, refusal: bytes = b"") -> AsyncIterator[ForwardProxy]:
    """Run a forward proxy in front of the server at a loopback port. With `refusal`, refuse
    everything.
    """
    proxy = ForwardProxy(port, refusal)
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await proxy.serve(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
