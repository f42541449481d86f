"""Time limits of connections whose clients are slow or idle, over real sockets with a manual
clock."""

import asyncio
import socket
from pathlib import Path

import anyio
import pytest

from proxy.app import create_app
from proxy.http_server import (
    BODY_S,
    HEAD_S,
    IDLE_S,
    MIN_BYTES_PER_S,
    READ_S,
    ConnectionRegistry,
    HTTPServer,
)
from proxy.models.scripted import ScriptedModel
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services
from tests.fakes.waiting import until
from tests.proxy.connection_fixture import (
    LARGE_BYTES,
    PIECE,
    UPLOAD,
    App,
    RunningServer,
    http_request,
    running_server,
)

# Heads


@pytest.mark.parametrize("incomplete_head", [b"", b"\r\n", b"GET /", http_request("/")[:-2]])
async def test_connection_with_an_incomplete_head_is_closed_after_the_time_limit(
    incomplete_head: bytes,
) -> None:
    async with running_server(App()) as server:
        slow, late = await server.connect(incomplete_head), await server.connect(incomplete_head)
        await server.advance(HEAD_S - 1)
        await slow.send(http_request("/").removeprefix(incomplete_head))
        assert (await slow.response())[0] == 200
        await server.advance(1)
        assert await late.read_to_end() == b""
        await slow.send(http_request("/"))
        assert (await slow.response())[0] == 200


async def test_slow_bytes_of_a_request_head_do_not_extend_its_time_limit() -> None:
    async with running_server(App()) as server:
        client = await server.connect(b"GET / HTTP/1.1\r\n")
        for _ in range(int(HEAD_S)):
            await client.send(b"X: y\r\n")
            await server.advance(1)
        assert await client.read_to_end() == b""


async def test_idle_connection_is_closed_after_its_time_limit() -> None:
    async with running_server(App()) as server:
        client, silent = await server.connect(), await server.connect()
        for each in (client, silent):
            await each.send(http_request("/"))
            assert (await each.response())[0] == 200
        await server.advance(IDLE_S - 1)
        await client.send(http_request("/"))
        assert (await client.response())[0] == 200
        await server.advance(1)
        assert await silent.read_to_end() == b""
        await client.send(http_request("/")[:-2])
        await server.advance(HEAD_S - 1)
        await client.send(b"\r\n")
        assert (await client.response())[0] == 200
        await client.send(http_request("/")[:-2])
        await server.advance(HEAD_S)
        assert await client.read_to_end() == b""


async def test_server_checks_for_expired_connections_periodically(tmp_path: Path) -> None:
    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    clock = ManualClock()
    connections = ConnectionRegistry(1, clock)
    http_server = HTTPServer(create_app(services), services.runs, connections, drain_s=3.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(20):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(http_server.serve(sockets=[listener]))
        async with RunningServer(url, connections, clock) as server:
            (client,) = await server.connect_in_order(1)
            clock.advance(HEAD_S)
            assert await client.read_to_end() == b""
        http_server.should_exit = True
        await serving
        await services.runs.aclose()
        services.store.close()


# Bodies


async def test_connection_is_aborted_if_the_request_body_pauses_too_long() -> None:
    app = App()
    async with running_server(app) as server:
        client, other = await server.connect(UPLOAD + PIECE), await server.connect(UPLOAD + PIECE)
        await server.advance(BODY_S - 1)
        await client.send(3 * PIECE)
        assert (await client.response())[2] == b"%d" % (4 * MIN_BYTES_PER_S)
        await server.advance(1)
        assert await other.read_to_end() == b""
        await until(lambda: len(app.uploads) == 2)
    assert app.uploads == [4 * MIN_BYTES_PER_S, MIN_BYTES_PER_S]


async def test_connection_is_aborted_if_the_request_body_arrives_too_slowly() -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(UPLOAD)
        for _ in range(int(BODY_S)):
            await client.send(b"x")
            await server.advance(1)
        await server.advance(1)
        assert await client.read_to_end() == b""


@pytest.mark.parametrize("headers", [(), ("Expect: 100-continue",)])
async def test_body_that_the_server_does_not_read_has_no_time_limit(
    headers: tuple[str, ...],
) -> None:
    app, body = App(), b"x" * (1 << 20)
    async with running_server(app) as server:
        client = await server.connect(
            http_request("/late", f"Content-Length: {len(body)}", *headers, method="POST")
        )
        # Half a MiB is more than the server buffers.
        await client.send(b"" if headers else body[: len(body) // 2])
        for _ in range(3):
            await server.advance(BODY_S)
        app.released.set()
        if headers:
            assert b"100 Continue" in await client.until(b"\r\n\r\n")
        await client.send(body if headers else body[len(body) // 2 :])
        assert (await client.response())[2] == b"%d" % len(body)


async def test_body_of_an_answered_request_does_not_extend_the_idle_limit() -> None:
    async with running_server(App()) as server:
        client = await server.connect(http_request("/", "Content-Length: 1000", method="POST"))
        assert (await client.response())[0] == 200
        for _ in range(int(IDLE_S) // 10):
            await client.send(b"x")
            await server.advance(10)
        assert await client.read_to_end() == b""


# Responses


@pytest.mark.parametrize("behind", [b"", http_request("/")[:-2], UPLOAD + PIECE])
async def test_streaming_response_has_no_time_limit(behind: bytes) -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(http_request("/stream"))
        await client.until(b"begun\r\n")
        await client.send(behind)
        for _ in range(10):
            await server.advance(10 * IDLE_S)
        app.released.set()
        assert b"ended" in await client.until(b"0\r\n\r\n")
        await server.advance(HEAD_S - 1)
        await client.send(
            (UPLOAD + 4 * PIECE if b"POST" in behind else http_request("/")).removeprefix(behind)
        )
        assert (await client.response())[0] == 200


async def test_streaming_response_with_an_unsent_request_body_has_no_time_limit() -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(http_request("/stream", "Content-Length: 5", method="POST"))
        await client.until(b"begun\r\n")
        await server.advance(10 * BODY_S)
        app.released.set()
        assert b"ended" in await client.until(b"0\r\n\r\n")
        await server.advance(IDLE_S)
        assert await client.read_to_end() == b""


async def test_time_limit_of_a_pipelined_request_begins_when_the_preceding_stream_ends() -> None:
    app = App()
    async with running_server(app) as server:
        clients = [
            await server.connect(http_request("/stream") + behind)
            for behind in (http_request("/")[:-2], UPLOAD)
        ]
        await server.advance(IDLE_S)
        app.released.set()
        for client in clients:
            await client.until(b"0\r\n\r\n")
        await server.advance(max(HEAD_S, BODY_S))
        for client in clients:
            assert await client.read_to_end() == b""


async def test_connection_is_aborted_if_the_client_does_not_read_the_response() -> None:
    async with running_server(App()) as server:
        client, other = (
            await server.connect(http_request("/large")),
            await server.connect(http_request("/large")),
        )
        for each in (client, other):
            await each.until(b"\r\n\r\n")
        for _ in range(3):
            await client.read(LARGE_BYTES // 4)
            await server.advance(READ_S - 1)
        await client.read(LARGE_BYTES // 4)
        await client.send(http_request("/"))
        assert (await client.response())[0] == 200
        assert len(await other.read_to_end()) < LARGE_BYTES


async def test_connection_is_aborted_if_the_client_reads_the_response_too_slowly() -> None:
    async with running_server(App()) as server:
        slow, good = await server.connect_in_order(2)
        server.shrink_buffers(16 << 10)
        for each in (slow, good):
            await each.send(http_request("/large"))
            await each.until(b"\r\n\r\n")
        await server.advance(0)
        for _ in range(2):
            for each, size in ((slow, 64 << 10), (good, 512 << 10)):
                unsent = server.unsent
                await each.read(size)
                await until(lambda unsent=unsent: server.unsent < unsent)
            await server.advance(READ_S - 1)
        assert len(await slow.read_to_end()) < LARGE_BYTES // 2
        await good.read(LARGE_BYTES - 2 * (512 << 10))
        await good.send(http_request("/"))
        assert (await good.response())[0] == 200


async def test_connection_is_aborted_if_the_client_does_not_read_a_stream() -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(http_request("/endless"))
        await client.until(b"\r\n\r\n")
        await server.advance(0)
        await server.advance(READ_S)
        assert await client.read_to_end()
        await app.client_left.wait()
