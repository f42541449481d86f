"""Two servers that share a PostgreSQL database, as behind a load balancer."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from sqlalchemy import URL

from policies.artifacts import ArtifactLimits
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.schemas.responses_response import run_id
from proxy.store.store import Store
from tests.clients.chat_http import BODY, PATH, answer_text, http_client, post_chat
from tests.fakes.backend import Held, ScriptedBackend, SeenRequest, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.waiting import until
from tests.postgresql import PostgresqlServer, new_database, server_for_tests

KEY = {"Idempotency-Key": "order-1"}
DETACHED = {**KEY, "X-Sandbox-On-Disconnect": "detach"}
STEP = tool_reply(call("execute_bash", command="echo 42"))
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with server_for_tests() as found:
        yield found


@pytest.fixture
def database(server: PostgresqlServer, tmp_path: Path) -> URL:
    return new_database(server, tmp_path.name)


@asynccontextmanager
async def two_servers(
    backend: ScriptedBackend, database: URL, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Yield a client of each of two servers on different machines."""
    stores = [Store(tmp_path / name, database_url=database) for name in ("one", "two")]
    for store in stores:
        assert store.messages
        assert await asyncio.to_thread(store.messages.wait_until_listening, TIMEOUT_S)
    files = [FileStore(store, limits=ArtifactLimits()) for store in stores]
    async with (
        running_proxy(backend, "memory", tmp_path / "one", files=files[0]) as one,
        running_proxy(backend, "memory", tmp_path / "two", files=files[1]) as two,
        http_client(one) as first,
        http_client(two) as second,
    ):
        with anyio.fail_after(TIMEOUT_S):
            yield first, second


async def test_retry_at_another_server_streams_the_run_while_it_continues(
    database: URL, tmp_path: Path
) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([STEP, Held(text_reply("It is 42."), release)]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        body = {**BODY, "stream": True}
        begun = asyncio.create_task(first.post(PATH, json=body, headers=KEY))
        await backend.arrived(2)
        async with second.stream("POST", PATH, json=body, headers=KEY) as joined:
            lines = joined.aiter_lines()
            seen = ""
            while "echo 42" not in seen:  # the first step, while the run goes on
                seen += await anext(lines)
            was_running = not begun.done()
            release.set()
            rest = "".join([line async for line in lines])
        at_first = await begun
    assert was_running
    assert "It is 42." in rest
    assert answer_text(at_first) == "It is 42."
    assert joined.headers["x-sandbox-run"] == at_first.headers["x-sandbox-run"]
    assert len(backend.requests) == 2


async def test_run_can_be_cancelled_through_another_server(database: URL, tmp_path: Path) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    async with (
        scripted_backend([held]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        begun = asyncio.create_task(post_chat(first, DETACHED))
        await backend.arrived(1)
        listed = await second.get("/v1/runs/none")
        cancelled = await second.delete(f"/v1/runs/{await run_of_key(second, begun)}")
        answered = await begun
    assert listed.status_code == 404
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert (answered.status_code, answered.json()["error"]["code"]) == (409, "run_cancelled")


async def test_deleting_a_response_cancels_its_run_at_another_server(
    database: URL, tmp_path: Path
) -> None:
    async with unanswered_response(database, tmp_path) as (first, second, path, model_call):
        deleted = await second.delete(path)
        await model_call.gone.wait()
        found = [await client.get(path) for client in (first, second)]
        run = await first.get(f"/v1/runs/{run_id(path.rpartition('/')[2])}")
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    assert [each.status_code for each in found] == [404, 404]
    assert run.json()["status"] == "cancelled"


async def test_deleting_a_container_cancels_its_run_at_another_server(
    database: URL, tmp_path: Path
) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    async with (
        scripted_backend([STEP, text_reply("It is 42."), held]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        session = {"X-Sandbox-Session": "mine"}
        container = (await post_chat(first, session)).headers["x-sandbox-container"]
        begun = asyncio.create_task(post_chat(first, {**session, **KEY}))
        await backend.arrived(3)
        deleted = await second.delete(f"/v1/containers/{container}")
        answered = await begun
        found = [await client.get(f"/v1/containers/{container}") for client in (first, second)]
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    assert (answered.status_code, answered.json()["error"]["code"]) == (409, "run_cancelled")
    assert [each.status_code for each in found] == [404, 404]


async def run_of_key(client: httpx.AsyncClient, begun: "asyncio.Task[httpx.Response]") -> str:
    """Return the id of the run with the key, from the headers of a stream that joins it."""
    body = {**BODY, "stream": True}
    async with client.stream("POST", PATH, json=body, headers=DETACHED) as joined:
        assert not begun.done()
        return joined.headers["x-sandbox-run"]


async def test_server_without_its_database_is_alive_but_not_ready(
    server: PostgresqlServer, database: URL, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        two_servers(backend, database, tmp_path) as (first, _),
    ):
        ready = await first.get("/health/ready")
        await asyncio.to_thread(server.stop)
        try:
            down = [await first.get(path) for path in ("/health/live", "/health/ready", "/health")]
        finally:
            await asyncio.to_thread(server.start)
        again = await first.get("/health/ready")
    assert (ready.status_code, again.status_code) == (200, 200)
    assert [each.status_code for each in down] == [200, 503, 200]
    assert down[1].json()["error"]["code"] == "store_unavailable"


async def test_end_of_a_run_during_a_database_outage_is_stored_once_the_database_is_back(
    server: PostgresqlServer, database: URL, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("It is 42."), release)]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        async with first.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
            path = f"/v1/runs/{answer.headers['x-sandbox-run']}"
            known = await second.get(path)
            while known.status_code == 404:
                known = await second.get(path)
            await asyncio.to_thread(server.stop)
            try:
                release.set()
                streamed = (await answer.aread()).decode()
                await until(lambda: "summaries of 1 runs cannot be stored" in caplog.text)
            finally:
                await asyncio.to_thread(server.start)
        ended = await second.delete(path)
    assert "It is 42." in streamed
    assert known.json()["status"] == "running"
    assert (ended.status_code, ended.json()["status"]) == (200, "completed")


async def test_answer_of_a_run_is_replayed_by_another_server(database: URL, tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, text_reply("It is 42.")]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        one, two = await post_chat(first, KEY), await post_chat(second, KEY)
    assert one.json() == two.json()
    assert len(backend.requests) == 2


async def test_background_response_is_streamed_by_another_server_while_its_run_continues(
    database: URL, tmp_path: Path
) -> None:
    async with background_response(database, tmp_path) as (first, second, path, release):
        async with second.stream("GET", path, params={"stream": "true"}) as followed:
            lines = followed.aiter_lines()
            seen = [await anext(lines)]
            while "echo 42" not in seen[-1]:  # the first step, while the run goes on
                seen.append(await anext(lines))
            during = (await second.get(path)).json()["status"]
            release.set()
            seen += [line async for line in lines]
        whole = await first.get(path, params={"stream": "true"})
        rest = await second.get(path, params={"stream": "true", "starting_after": "3"})
    assert during == "in_progress"
    assert events_of(seen) == events_of(whole.text.splitlines())
    assert events_of(seen)[-1]["type"] == "response.completed"
    assert events_of(rest.text.splitlines()) == events_of(seen)[4:]


async def test_stream_at_another_server_begins_after_the_event_that_the_client_names(
    database: URL, tmp_path: Path
) -> None:
    async with background_response(database, tmp_path) as (first, second, path, release):
        query = {"stream": "true", "starting_after": "3"}
        async with second.stream("GET", path, params=query) as followed:
            was_running = (await first.get(path)).json()["status"] == "in_progress"
            release.set()
            seen = events_of([line async for line in followed.aiter_lines()])
    assert was_running
    assert [each["sequence_number"] for each in seen] == list(range(4, 4 + len(seen)))
    assert seen[-1]["type"] == "response.completed"


async def test_stream_at_another_server_ends_when_its_response_is_cancelled(
    database: URL, tmp_path: Path
) -> None:
    async with (
        unanswered_response(database, tmp_path) as (_, second, path, _),
        second.stream("GET", path, params={"stream": "true"}) as followed,
    ):
        cancelled = await second.post(f"{path}/cancel")
        seen = events_of([line async for line in followed.aiter_lines()])
    assert cancelled.json()["status"] == "cancelled"
    assert seen[-1]["response"]["status"] == "cancelled"


async def test_stream_at_another_server_can_be_resumed_and_shared(
    database: URL, tmp_path: Path
) -> None:
    async with background_response(database, tmp_path) as (first, second, path, release):
        async with second.stream("GET", path, params={"stream": "true"}) as dropped:
            await anext(dropped.aiter_lines())
        query = {"stream": "true", "starting_after": "1"}
        async with (
            second.stream("GET", path, params=query) as resumed,
            second.stream("GET", path, params=query) as shared,
        ):
            release.set()
            both = [
                events_of([line async for line in stream.aiter_lines()])
                for stream in (resumed, shared)
            ]
        whole = await first.get(path, params={"stream": "true"})
    expected = events_of(whole.text.splitlines())[2:]
    assert both == [expected, expected]


@asynccontextmanager
async def background_response(
    database: URL, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, str, asyncio.Event]]:
    """Yield a client of each server, the path of a response that is in progress at the first one
    after a step, and the event that lets its answer begin. The model must be called twice."""
    release = asyncio.Event()
    async with (
        scripted_backend([STEP, Held(text_reply("It is 42."), release)]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        path = await begin_background_response(first)
        await backend.arrived(2)
        yield first, second, path, release
        assert len(backend.requests) == 2


@asynccontextmanager
async def unanswered_response(
    database: URL, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, str, SeenRequest]]:
    """Yield a client of each server, the path of a response that is in progress at the first one,
    and its model call, which is never answered."""
    held = Held(text_reply("Never said."), asyncio.Event())
    async with (
        scripted_backend([held]) as backend,
        two_servers(backend, database, tmp_path) as (first, second),
    ):
        path = await begin_background_response(first)
        yield first, second, path, await backend.arrived(1)


async def begin_background_response(client: httpx.AsyncClient) -> str:
    """Begin a background response and return its path."""
    body = {"model": BODY["model"], "input": "How many?", "background": True}
    begun = await client.post("/v1/responses", json=body)
    return f"/v1/responses/{begun.json()['id']}"


def events_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the data of server-sent events."""
    return [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
