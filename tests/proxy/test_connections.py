"""Connections whose clients are slow or idle, over real sockets; time passes by hand."""

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
    TAKE_S,
    HTTPServer,
    OpenConnections,
)
from proxy.models.scripted import ScriptedModel
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services
from tests.fakes.waiting import until
from tests.proxy.connection_fixture import LARGE_BYTES, PIECE, UPLOAD, App, House, asking, house

# Heads


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET /", asking("/")[:-2]])
async def test_head_must_be_complete_in_time(begun: bytes) -> None:
    async with house(App()) as here:
        slow, late = await here.dial(begun), await here.dial(begun)
        await here.pass_time(HEAD_S - 1)
        await slow.send(asking("/").removeprefix(begun))
        assert (await slow.answer())[0] == 200
        await here.pass_time(1)
        assert await late.rest() == b""
        await slow.send(asking("/"))
        assert (await slow.answer())[0] == 200


async def test_bytes_of_a_head_win_no_time() -> None:
    async with house(App()) as here:
        client = await here.dial(b"GET / HTTP/1.1\r\n")
        for _ in range(int(HEAD_S)):
            await client.send(b"X: y\r\n")
            await here.pass_time(1)
        assert await client.rest() == b""


async def test_idle_connection_is_kept_and_then_closed() -> None:
    async with house(App()) as here:
        client, silent = await here.dial(), await here.dial()
        for each in (client, silent):
            await each.send(asking("/"))
            assert (await each.answer())[0] == 200
        await here.pass_time(IDLE_S - 1)
        await client.send(asking("/"))
        assert (await client.answer())[0] == 200
        await here.pass_time(1)
        assert await silent.rest() == b""
        await client.send(asking("/")[:-2])
        await here.pass_time(HEAD_S - 1)
        await client.send(b"\r\n")
        assert (await client.answer())[0] == 200
        await client.send(asking("/")[:-2])
        await here.pass_time(HEAD_S)
        assert await client.rest() == b""


async def test_server_looks_by_itself(tmp_path: Path) -> None:
    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    clock = ManualClock()
    connections = OpenConnections(1, clock)
    server = HTTPServer(create_app(services), services.runs, connections)
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(20):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with House(url, connections, clock) as here:
            (client,) = await here.dial_in_turn(1)
            clock.advance(HEAD_S)
            assert await client.rest() == b""
        server.should_exit = True
        await serving
        await services.runs.aclose()
        services.store.close()


# Bodies


async def test_body_that_pauses_too_long_is_given_up() -> None:
    app = App()
    async with house(app) as here:
        client, other = await here.dial(UPLOAD + PIECE), await here.dial(UPLOAD + PIECE)
        await here.pass_time(BODY_S - 1)
        await client.send(3 * PIECE)
        assert (await client.answer())[2] == b"%d" % (4 * MIN_BYTES_PER_S)
        await here.pass_time(1)
        assert await other.rest() == b""
        await until(lambda: len(app.uploads) == 2)
    assert app.uploads == [4 * MIN_BYTES_PER_S, MIN_BYTES_PER_S]


async def test_trickled_body_is_given_up() -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(UPLOAD)
        for _ in range(int(BODY_S)):
            await client.send(b"x")
            await here.pass_time(1)
        await here.pass_time(1)
        assert await client.rest() == b""


@pytest.mark.parametrize("headers", [(), ("Expect: 100-continue",)])
async def test_body_that_the_server_does_not_read_yet_may_take_its_time(
    headers: tuple[str, ...],
) -> None:
    app, body = App(), b"x" * (1 << 20)
    async with house(app) as here:
        client = await here.dial(
            asking("/late", f"Content-Length: {len(body)}", *headers, method="POST")
        )
        # More than the server takes in unread.
        await client.send(b"" if headers else body[: len(body) // 2])
        for _ in range(3):
            await here.pass_time(BODY_S)
        app.may_go_on.set()
        if headers:
            assert b"100 Continue" in await client.until(b"\r\n\r\n")
        await client.send(body if headers else body[len(body) // 2 :])
        assert (await client.answer())[2] == b"%d" % len(body)


async def test_body_of_an_answered_request_wins_no_time() -> None:
    async with house(App()) as here:
        client = await here.dial(asking("/", "Content-Length: 1000", method="POST"))
        assert (await client.answer())[0] == 200
        for _ in range(int(IDLE_S) // 10):
            await client.send(b"x")
            await here.pass_time(10)
        assert await client.rest() == b""


# Answers


@pytest.mark.parametrize("behind", [b"", asking("/")[:-2], UPLOAD + PIECE])
async def test_stream_is_never_closed(behind: bytes) -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(asking("/stream"))
        await client.until(b"begun\r\n")
        await client.send(behind)
        for _ in range(10):
            await here.pass_time(10 * IDLE_S)
        app.may_go_on.set()
        assert b"ended" in await client.until(b"0\r\n\r\n")
        await here.pass_time(HEAD_S - 1)
        await client.send(
            (UPLOAD + 4 * PIECE if b"POST" in behind else asking("/")).removeprefix(behind)
        )
        assert (await client.answer())[0] == 200


async def test_stream_is_not_closed_though_its_request_has_a_body_that_does_not_come() -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(asking("/stream", "Content-Length: 5", method="POST"))
        await client.until(b"begun\r\n")
        await here.pass_time(10 * BODY_S)
        app.may_go_on.set()
        assert b"ended" in await client.until(b"0\r\n\r\n")
        await here.pass_time(IDLE_S)
        assert await client.rest() == b""


async def test_what_a_client_sends_behind_a_stream_has_its_time_after_it() -> None:
    app = App()
    async with house(app) as here:
        clients = [
            await here.dial(asking("/stream") + behind) for behind in (asking("/")[:-2], UPLOAD)
        ]
        await here.pass_time(IDLE_S)
        app.may_go_on.set()
        for client in clients:
            await client.until(b"0\r\n\r\n")
        await here.pass_time(max(HEAD_S, BODY_S))
        for client in clients:
            assert await client.rest() == b""


async def test_answer_that_is_not_taken_is_given_up() -> None:
    async with house(App()) as here:
        client, other = await here.dial(asking("/large")), await here.dial(asking("/large"))
        for each in (client, other):
            await each.until(b"\r\n\r\n")
        for _ in range(3):
            await client.read(LARGE_BYTES // 4)
            await here.pass_time(TAKE_S - 1)
        await client.read(LARGE_BYTES // 4)
        await client.send(asking("/"))
        assert (await client.answer())[0] == 200
        assert len(await other.rest()) < LARGE_BYTES


async def test_answer_that_is_taken_too_slowly_is_given_up() -> None:
    async with house(App()) as here:
        slow, good = await here.dial_in_turn(2)
        here.shrink_buffers(16 << 10)
        for each in (slow, good):
            await each.send(asking("/large"))
            await each.until(b"\r\n\r\n")
        await here.pass_time(0)
        for _ in range(2):
            for each, size in ((slow, 64 << 10), (good, 512 << 10)):
                unsent = here.unsent
                await each.read(size)
                await until(lambda unsent=unsent: here.unsent < unsent)
            await here.pass_time(TAKE_S - 1)
        assert len(await slow.rest()) < LARGE_BYTES // 2
        await good.read(LARGE_BYTES - 2 * (512 << 10))
        await good.send(asking("/"))
        assert (await good.answer())[0] == 200


async def test_stream_whose_client_takes_nothing_is_given_up() -> None:
    app = App()
    async with house(app) as here:
        client = await here.dial(asking("/endless"))
        await client.until(b"\r\n\r\n")
        await here.pass_time(0)
        await here.pass_time(TAKE_S)
        assert await client.rest()
        await app.is_left.wait()
