"""Limits on the number of connections and of pipelined requests, over real sockets."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from proxy.app import create_app
from proxy.http_server import HEADROOM, MAX_PIPELINED, ConnectionRegistry, connection_limit
from proxy.models.scripted import ScriptedModel
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, serve_app
from tests.fakes.waiting import until
from tests.proxy.connection_fixture import (
    LARGE_BYTES,
    App,
    RunningServer,
    http_request,
    running_server,
)

MOST = 3


@asynccontextmanager
async def full_server(state_dir: Path) -> AsyncIterator[tuple[RunningServer, httpx.AsyncClient]]:
    """Serve the application with as many open streams as there may be connections."""
    streams = App()
    proxy_app = create_app(make_services(ScriptedModel([]), MemorySandboxes(), state_dir))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (streams if scope["path"] == "/stream" else proxy_app)(scope, receive, send)

    connections = ConnectionRegistry(MOST, ManualClock())
    with anyio.fail_after(20):
        async with (
            serve_app(app, connections) as url,
            RunningServer(url, connections, ManualClock()) as server,
            httpx.AsyncClient(base_url=url) as client,
        ):
            for _ in range(MOST):
                await (await server.connect(http_request("/stream"))).until(b"begun\r\n")
            try:
                yield server, client
            finally:
                streams.released.set()


async def send_requests(server: RunningServer, count: int) -> None:
    """Open `count` connections in order, each with one answered request."""
    for _ in range(count):
        client = await server.connect(http_request("/"))
        assert (await client.response())[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/healthy"])
async def test_request_above_the_connection_limit_is_refused_with_503(
    path: str, tmp_path: Path
) -> None:
    async with full_server(tmp_path) as (_, client):
        for content in (b"{}", b" " * (4 << 20)):
            response = await client.post(path, content=content)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.headers["x-request-id"]
            body = response.json()
            assert (
                body["error"]["message"] == "The server has too many connections open. Ask again."
            )
            assert ("type" in body) == (path == "/v1/messages")


async def test_health_and_metrics_are_answered_above_the_connection_limit(tmp_path: Path) -> None:
    async with full_server(tmp_path) as (server, client):
        assert (await client.get("/health")).json() == {"status": "ok"}
        await server.connect_in_order(HEADROOM - 1)
        assert "sandbox_runs" in (await client.get("/metrics?x=1")).text
        # The headroom is used up: the longest idle connections are closed.
        for _ in range(3 * HEADROOM):
            await server.connect()
        async with httpx.AsyncClient() as other:
            assert (await other.get(client.base_url.join("/health"))).status_code == 200
        assert server.open <= MOST + HEADROOM


async def test_health_is_answered_in_the_middle_of_a_burst_of_connections(tmp_path: Path) -> None:
    """The server accepts a whole burst before it reads from any of its connections."""
    async with full_server(tmp_path) as (_, client):
        address = (client.base_url.host, client.base_url.port or 0)
        with contextlib.ExitStack() as opened:

            def connect() -> socket.socket:
                return opened.enter_context(socket.create_connection(address))

            for _ in range(3 * HEADROOM):
                connect()
            asking = connect()
            asking.sendall(http_request("/health"))
            for _ in range(3 * HEADROOM):
                connect()
            asking.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(asking, 1000)
    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_request_above_the_connection_limit_closes_the_longest_idle_connection() -> None:
    async with running_server(App(), MOST) as server:
        first, second, third = await server.connect_in_order(MOST)
        await first.send(http_request("/"))  # now it is the most recently idle one
        assert (await first.response())[0] == 200
        (fourth,) = await server.connect_in_order(1)
        await fourth.send(http_request("/"))
        assert (await fourth.response())[0] == 200
        assert await second.read_to_end() == b""
        for each in (first, third):
            await each.send(http_request("/"))
            assert (await each.response())[0] == 200


async def test_longest_idle_connection_is_closed_if_a_new_one_exceeds_limit_and_headroom() -> None:
    async with running_server(App(), MOST) as server:
        clients = await server.connect_in_order(MOST + HEADROOM)
        for _ in range(2):
            clients.append(await server.connect())
            assert await clients.pop(0).read_to_end() == b""
        assert server.open == MOST + HEADROOM
        await clients[0].send(http_request("/"))
        assert (await clients[0].response())[0] == 200


async def test_new_connection_is_closed_if_no_connection_is_idle() -> None:
    app = App()
    async with running_server(app, MOST) as server:
        for _ in range(MOST):
            await (await server.connect(http_request("/stream"))).until(b"begun\r\n")
        for _ in range(HEADROOM):
            await (await server.connect(http_request("/metrics"))).until(b"begun\r\n")
        late = await server.connect()
        assert await late.read_to_end() == b""


async def test_connection_with_an_unsent_response_is_not_idle() -> None:
    async with running_server(App(), MOST) as server:
        (slow,) = await server.connect_in_order(1)
        await slow.send(http_request("/large"))
        await slow.until(b"\r\n\r\n")
        await send_requests(server, 2 * MOST)
        assert await slow.read(LARGE_BYTES) == bytes(LARGE_BYTES)
        # After the response is sent, the connection is idle.
        await server.advance(0)
        await send_requests(server, 2 * MOST)
        assert await slow.read_to_end() == b""


async def test_disconnect_with_pipelined_requests_cancels_the_request_being_answered() -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(http_request("/endless") + http_request("/"))
        await client.until(b"\r\n\r\n")
        await client.aclose()
        await app.client_left.wait()


async def test_disconnects_with_pipelined_requests_do_not_raise_the_connection_limit() -> None:
    app = App()
    async with running_server(app, MOST) as server:
        for _ in range(MOST):
            client = await server.connect(http_request("/held") + http_request("/"))
            await until(lambda: app.held == 1)
            await client.aclose()
            await until(lambda: server.open == 0)
            app.released.set()
            await until(lambda: app.held == 0)
            app.released.clear()
        for _ in range(MOST):
            await (await server.connect(http_request("/stream"))).until(b"begun\r\n")
        late = await server.connect(http_request("/"))
        assert (await late.response())[0] == 503


async def test_clients_of_one_address_may_use_half_of_the_connections() -> None:
    app = App()
    async with running_server(app, 2 * MOST, is_shared="127.0.0.1".__eq__) as server:
        idle = await server.connect(http_request("/"), "127.0.0.2")
        assert (await idle.response())[0] == 200
        for _ in range(MOST - 1):
            await (await server.connect(http_request("/stream"), "127.0.0.2")).until(b"begun\r\n")
        last = await server.connect(http_request("/stream"), "127.0.0.2")
        await last.until(b"begun\r\n")
        assert await idle.read_to_end() == b""  # closed for another connection of its address
        refused = await server.connect(http_request("/"), "127.0.0.2")
        assert (await refused.response())[0] == 503
        await refused.read_to_end()
        await send_requests(server, 1)
        for _ in range(MOST - 1):
            await (await server.connect(http_request("/stream"), "127.0.0.3")).until(b"begun\r\n")
        await last.aclose()
        await until(lambda: server.open == 2 * MOST - 1)
        assert (await (await server.connect(http_request("/"), "127.0.0.2")).response())[0] == 200


async def test_excess_connections_of_one_address_close_no_connection_of_another_address() -> None:
    async with running_server(App(), 2 * MOST, is_shared=lambda address: False) as server:
        early = await server.connect(http_request("/"))
        assert (await early.response())[0] == 200
        clients = [await server.connect(b"", "127.0.0.2") for _ in range(MOST + HEADROOM)]
        for _ in range(MOST + HEADROOM):
            clients.append(await server.connect(b"", "127.0.0.2"))
            assert await clients.pop(0).read_to_end() == b""
        await early.send(http_request("/"))
        assert (await early.response())[0] == 200


async def test_number_of_pipelined_requests_is_limited() -> None:
    app = App()
    async with running_server(app) as server:
        client = await server.connect(http_request("/stream") + MAX_PIPELINED * http_request("/"))
        await client.until(b"begun\r\n")
        other = await server.connect(
            http_request("/stream") + (MAX_PIPELINED + 1) * http_request("/")
        )
        assert b"400 Bad Request" in await other.read_to_end()
        app.released.set()
        await client.until(b"0\r\n\r\n")
        for _ in range(MAX_PIPELINED):
            assert (await client.response())[0] == 200


@pytest.mark.parametrize(
    ("files", "most"),
    [(100_000, 4096), (1024, 512 - HEADROOM), (10, 1), (resource.RLIM_INFINITY, 4096)],
)
def test_connection_limit_is_at_most_half_of_the_limit_of_open_files(files: int, most: int) -> None:
    assert connection_limit(4096, files) == most
