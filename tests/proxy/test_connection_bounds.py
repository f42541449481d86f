"""More connections and requests than there may be at once, over real sockets."""

import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from proxy.app import create_app
from proxy.http_server import HEADROOM, MAX_PIPELINED, OpenConnections, most_connections
from proxy.models.scripted import ScriptedModel
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, serve_app
from tests.fakes.waiting import until
from tests.proxy.connection_fixture import LARGE_BYTES, App, House, asking, house

MOST = 3


@asynccontextmanager
async def full_house(state_dir: Path) -> AsyncIterator[tuple[House, httpx.AsyncClient]]:
    """The whole application, with as many streams at work as there may be connections."""
    held = App()
    whole = create_app(make_services(ScriptedModel([]), MemorySandboxes(), state_dir))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (held if scope["path"] == "/stream" else whole)(scope, receive, send)

    connections = OpenConnections(MOST, ManualClock())
    with anyio.fail_after(20):
        async with (
            serve_app(app, connections) as url,
            House(url, connections, ManualClock()) as here,
            httpx.AsyncClient(base_url=url) as client,
        ):
            for _ in range(MOST):
                await (await here.dial(asking("/stream"))).until(b"begun\r\n")
            try:
                yield here, client
            finally:
                held.may_go_on.set()


async def ask_in_turn(here: House, count: int) -> None:
    """So many clients, each answered before the next comes; all stay."""
    for _ in range(count):
        client = await here.dial(asking("/"))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/healthy"])
async def test_request_beyond_the_bound_is_refused(path: str, tmp_path: Path) -> None:
    async with full_house(tmp_path) as (_, client):
        for body in (b"{}", b" " * (4 << 20)):
            answer = await client.post(path, content=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.headers["x-request-id"]
            told = answer.json()
            assert (
                told["error"]["message"] == "The server has too many connections open. Ask again."
            )
            assert ("type" in told) == (path == "/v1/messages")


async def test_health_and_metrics_are_answered_beyond_the_bound(tmp_path: Path) -> None:
    async with full_house(tmp_path) as (here, client):
        assert (await client.get("/health")).json() == {"status": "ok"}
        await here.dial_in_turn(HEADROOM - 1)
        assert "sandbox_runs" in (await client.get("/metrics?x=1")).text
        # Now there is no room at all: who has waited longest leaves.
        for _ in range(3 * HEADROOM):
            await here.dial()
        async with httpx.AsyncClient() as other:
            assert (await other.get(client.base_url.join("/health"))).status_code == 200
        assert here.open <= MOST + HEADROOM


async def test_request_takes_the_place_of_who_has_waited_longest() -> None:
    async with house(App(), MOST) as here:
        first, second, third = await here.dial_in_turn(MOST)
        await first.send(asking("/"))  # waits anew, and so as the last of them
        assert (await first.answer())[0] == 200
        (fourth,) = await here.dial_in_turn(1)
        await fourth.send(asking("/"))
        assert (await fourth.answer())[0] == 200
        assert await second.rest() == b""
        for each in (first, third):
            await each.send(asking("/"))
            assert (await each.answer())[0] == 200


async def test_connections_far_beyond_the_bound_are_closed_oldest_first() -> None:
    async with house(App(), MOST) as here:
        clients = await here.dial_in_turn(MOST + HEADROOM)
        for _ in range(2):
            clients.append(await here.dial())
            assert await clients.pop(0).rest() == b""
        assert here.open == MOST + HEADROOM
        await clients[0].send(asking("/"))
        assert (await clients[0].answer())[0] == 200


async def test_new_connection_is_closed_where_none_waits() -> None:
    app = App()
    async with house(app, MOST) as here:
        for _ in range(MOST):
            await (await here.dial(asking("/stream"))).until(b"begun\r\n")
        for _ in range(HEADROOM):
            await (await here.dial(asking("/metrics"))).until(b"begun\r\n")
        late = await here.dial()
        assert await late.rest() == b""


async def test_connection_whose_answer_is_not_sent_yet_is_not_closed_for_another() -> None:
    async with house(App(), MOST) as here:
        (slow,) = await here.dial_in_turn(1)
        await slow.send(asking("/large"))
        await slow.until(b"\r\n\r\n")
        await ask_in_turn(here, 2 * MOST)
        assert await slow.read(LARGE_BYTES) == bytes(LARGE_BYTES)
        # Once it is sent, the connection waits like any other.
        await here.pass_time(0)
        await ask_in_turn(here, 2 * MOST)
        assert await slow.rest() == b""


async def test_client_that_leaves_with_requests_queued_ends_the_one_that_is_answered() -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(asking("/endless") + asking("/"))
        await client.until(b"\r\n\r\n")
        await client.aclose()
        await app.is_left.wait()


async def test_clients_that_leave_with_requests_queued_make_no_room_for_others() -> None:
    app = App()
    async with house(app, MOST) as here:
        for _ in range(MOST):
            client = await here.dial(asking("/held") + asking("/"))
            await until(lambda: app.held == 1)
            await client.aclose()
            await until(lambda: here.open == 0)
            app.may_go_on.set()
            await until(lambda: app.held == 0)
            app.may_go_on.clear()
        for _ in range(MOST):
            await (await here.dial(asking("/stream"))).until(b"begun\r\n")
        late = await here.dial(asking("/"))
        assert (await late.answer())[0] == 503


async def test_one_address_has_half_of_the_connections() -> None:
    app = App()
    async with house(app, 2 * MOST, is_many="127.0.0.1".__eq__) as here:
        idle = await here.dial(asking("/"), "127.0.0.2")
        assert (await idle.answer())[0] == 200
        for _ in range(MOST - 1):
            await (await here.dial(asking("/stream"), "127.0.0.2")).until(b"begun\r\n")
        last = await here.dial(asking("/stream"), "127.0.0.2")
        await last.until(b"begun\r\n")
        assert await idle.rest() == b""  # it has made room for another of its address
        refused = await here.dial(asking("/"), "127.0.0.2")
        assert (await refused.answer())[0] == 503
        await refused.rest()
        await ask_in_turn(here, 1)
        for _ in range(MOST - 1):
            await (await here.dial(asking("/stream"), "127.0.0.3")).until(b"begun\r\n")
        await last.aclose()
        await until(lambda: here.open == 2 * MOST - 1)
        assert (await (await here.dial(asking("/"), "127.0.0.2")).answer())[0] == 200


async def test_connections_of_one_address_close_none_of_another() -> None:
    async with house(App(), 2 * MOST, is_many=lambda address: False) as here:
        early = await here.dial(asking("/"))
        assert (await early.answer())[0] == 200
        clients = [await here.dial(b"", "127.0.0.2") for _ in range(MOST + HEADROOM)]
        for _ in range(MOST + HEADROOM):
            clients.append(await here.dial(b"", "127.0.0.2"))
            assert await clients.pop(0).rest() == b""
        await early.send(asking("/"))
        assert (await early.answer())[0] == 200


async def test_pipelined_requests_are_bounded() -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(asking("/stream") + MAX_PIPELINED * asking("/"))
        await client.until(b"begun\r\n")
        other = await here.dial(asking("/stream") + (MAX_PIPELINED + 1) * asking("/"))
        assert b"400 Bad Request" in await other.rest()
        app.may_go_on.set()
        await client.until(b"0\r\n\r\n")
        for _ in range(MAX_PIPELINED):
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("files", "most"),
    [(100_000, 4096), (1024, 512 - HEADROOM), (10, 1), (resource.RLIM_INFINITY, 4096)],
)
def test_bound_leaves_half_of_the_files(files: int, most: int) -> None:
    assert most_connections(4096, files) == most
