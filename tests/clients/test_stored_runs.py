"""Results of runs after a restart, and in every process that shares the data directory."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from proxy.api.dependencies import owner_of
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import KEEP_S, RunManager
from proxy.store.records import StoredRun
from tests.clients.chat_http import (
    FIRST,
    SECOND,
    ConcurrentRequests,
    answer_text,
    disconnect_after,
    http_client,
    post_chat,
    reasoning_text,
)
from tests.fakes.backend import Held, Refusal, ScriptedBackend, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import ATTEMPTS, running_proxy
from tests.fakes.waiting import until
from tests.stores import connected, open_store, sqlite_only

KEY = {"Idempotency-Key": "order-1"}
DETACH = {"X-Sandbox-On-Disconnect": "detach"}
NEVER = "Never said."
STEP = tool_reply(call("execute_bash", command="echo 42; echo data > output/data"))


async def answer_of_new_server(
    backend: ScriptedBackend, state_dir: Path, headers: Mapping[str, str], **body: Any
) -> httpx.Response:
    """Return the answer of a server that is started for this request and then stopped."""
    async with (
        running_proxy(backend, "memory", state_dir, status_wait_s=60.0) as url,
        http_client(url) as http,
    ):
        return await post_chat(http, headers, **body)


async def run_record(backend: ScriptedBackend, state_dir: Path, run_id: str) -> Any:
    """Return the run's record from a server started for this request."""
    async with running_proxy(backend, "memory", state_dir) as url, http_client(url) as http:
        return (await http.get(f"/v1/runs/{run_id}")).json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stream_again", [False, True])
async def test_result_of_an_idempotency_key_survives_a_restart(
    stream: bool, stream_again: bool, tmp_path: Path
) -> None:
    async with scripted_backend([STEP, text_reply("42")]) as backend:
        first = await answer_of_new_server(backend, tmp_path, KEY, stream=stream)
        second = await answer_of_new_server(backend, tmp_path, KEY, stream=stream_again)
        third = await answer_of_new_server(backend, tmp_path, KEY, stream=stream_again)
    assert {answer_text(each) for each in (first, second, third)} == {"42"}
    assert {reasoning_text(each).partition("[exit 0")[0] for each in (first, second)} == {
        "````console\n$ echo 42; echo data > output/data\n42\n"
    }
    names = ("x-sandbox-run", "x-sandbox-container")
    assert [first.headers[name] for name in names] == [second.headers[name] for name in names]
    assert second.text == third.text
    if not (stream or stream_again):
        assert first.json() == second.json()
    assert len(backend.requests) == 2


@pytest.mark.parametrize("later_s", [KEEP_S - 1, KEEP_S])
async def test_idempotency_key_with_an_expired_result_starts_a_new_run(
    later_s: float, tmp_path: Path
) -> None:
    clock, answers = ManualClock(), []
    async with scripted_backend([text_reply("one"), text_reply("two")]) as backend:
        for _ in range(2):
            files = FileStore(open_store(tmp_path, now=clock.time), limits=ArtifactLimits())
            async with (
                running_proxy(backend, "memory", tmp_path, files=files) as url,
                http_client(url) as http,
            ):
                answers.append(answer_text(await post_chat(http, KEY)))
            clock.advance(later_s)
    assert answers == ["one", "one" if later_s < KEEP_S else "two"]


async def test_idempotency_key_of_another_request_is_refused_after_a_restart(
    tmp_path: Path,
) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        await answer_of_new_server(backend, tmp_path, KEY)
        other = await answer_of_new_server(backend, tmp_path, KEY, temperature=0.1)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_results_of_all_choices_are_stored(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("one"), text_reply("two")]) as backend:
        first = await answer_of_new_server(backend, tmp_path, KEY, n=2)
        second = await answer_of_new_server(backend, tmp_path, KEY, n=2)
    assert len(first.json()["choices"]) == 2
    assert first.json() == second.json()


async def test_sdk_retry_gets_an_undelivered_result_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), text_reply("two")]
    async with scripted_backend(script) as backend:
        make_runs = partial(RunManager, grace_s=3600)
        async with running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url:
            with anyio.fail_after(20):
                await disconnect_after(backend, 1, url, FIRST)
                release.set()
                await until(lambda: "ended: answered" in caplog.text)
        answers = [
            answer_text(await answer_of_new_server(backend, tmp_path, SECOND)) for _ in range(2)
        ]
    assert answers == ["one", "two"]


@pytest.mark.parametrize("headers", [DETACH, {**DETACH, **KEY}])
async def test_detached_run_is_found_after_a_restart(
    headers: dict[str, str], tmp_path: Path
) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        first = await answer_of_new_server(backend, tmp_path, headers)
        record = await run_record(backend, tmp_path, first.headers["x-sandbox-run"])
    assert (record["status"], record["error"]) == ("completed", None)
    assert record["completion"] == first.json()


async def test_error_of_a_detached_run_is_found_after_a_restart(tmp_path: Path) -> None:
    async with scripted_backend([Refusal(418, "a teapot", code="teapot")]) as backend:
        first = await answer_of_new_server(backend, tmp_path, DETACH, stream=True)
        record = await run_record(backend, tmp_path, first.headers["x-sandbox-run"])
    assert (record["status"], record["completion"]) == ("failed", None)
    assert record["error"] == first.json()["error"]
    assert record["error"]["message"] == "a teapot"


async def test_idempotency_key_of_a_failed_run_starts_a_new_run_after_a_restart(
    tmp_path: Path,
) -> None:
    async with scripted_backend([*[Refusal(500)] * ATTEMPTS, text_reply("42")]) as backend:
        assert (await answer_of_new_server(backend, tmp_path, KEY)).status_code == 500
        assert answer_text(await answer_of_new_server(backend, tmp_path, KEY)) == "42"


async def test_idempotency_key_of_a_run_interrupted_by_shutdown_starts_a_new_run(
    tmp_path: Path,
) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("42")]
    headers = {**KEY, **DETACH}
    async with scripted_backend(script) as backend:
        async with running_proxy(backend, "memory", tmp_path) as url:
            with anyio.fail_after(20):
                await disconnect_after(backend, 1, url, headers)
        assert answer_text(await answer_of_new_server(backend, tmp_path, headers)) == "42"


# Several processes


@pytest.mark.parametrize("streams", [(False, True), (True, False)])
async def test_request_with_the_same_idempotency_key_joins_the_run_of_another_process(
    streams: tuple[bool, bool], tmp_path: Path
) -> None:
    release = asyncio.Event()
    script = [STEP, Held(text_reply("42"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        http_client(one) as first_client,
        http_client(other) as second_client,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                first, second = (
                    ConcurrentRequests(first_client, group),
                    ConcurrentRequests(second_client, group),
                )
                first.begin(KEY, stream=streams[0])
                await backend.arrived(2)
                second.begin(KEY, stream=streams[1])
                wrong = await post_chat(second_client, KEY, temperature=0.1)
                release.set()
            later = await post_chat(second_client, KEY)
    responses = [first.responses[0], second.responses[0], later]
    assert {answer_text(each) for each in responses} == {"42"}
    assert len({reasoning_text(each).partition("[exit 0")[0] for each in responses}) == 1
    assert len({each.headers["x-sandbox-run"] for each in responses}) == 1
    assert wrong.status_code == 422
    assert len(backend.requests) == 2


async def test_concurrent_requests_with_one_idempotency_key_to_two_processes_start_one_run(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        http_client(one) as first_client,
        http_client(other) as second_client,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                sides = [
                    ConcurrentRequests(first_client, group),
                    ConcurrentRequests(second_client, group),
                ]
                for _ in range(8):
                    for side in sides:
                        side.begin(KEY)
    responses = [response for side in sides for response in side.responses.values()]
    assert len(responses) == 16
    assert len({each.text for each in responses}) == 1
    assert len(backend.requests) == 1


async def test_concurrent_requests_with_one_idempotency_key_leave_no_response_in_progress(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        http_client(one) as first_client,
        http_client(other) as second_client,
    ):
        ids = set()

        async def create(side: httpx.AsyncClient) -> None:
            body = {"model": "m", "input": "How many?"}
            ids.add((await side.post("/v1/responses", json=body, headers=KEY)).json()["id"])

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for side in (first_client, second_client) * 3:
                    group.start_soon(create, side)
        with connected(tmp_path) as database:
            query = "SELECT id FROM responses WHERE worker IS NOT NULL"
            at_work = database.exec_driver_sql(query).all()
    assert (len(ids), len(backend.requests), at_work) == (1, 1, [])


@sqlite_only  # with PostgreSQL the other process cancels the run: see test_replicas
async def test_container_with_a_run_of_another_process_is_not_deleted(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        http_client(one) as first_client,
        http_client(other) as second_client,
    ):
        headers = {**KEY, "X-Sandbox-Session": "mine"}
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(first_client, group)
                requests.begin(headers)
                await backend.arrived(1)
                listed = (await second_client.get("/v1/containers")).json()["data"]
                (path,) = [f"/v1/containers/{each['id']}" for each in listed]
                refused = await second_client.delete(path)
                release.set()
            deleted = await second_client.delete(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_elsewhere")
    assert answer_text(requests.responses[0]) == "42"
    assert deleted.json()["deleted"] is True


async def test_cancelled_run_of_a_dead_server_leaves_no_checkpoint(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as dead:
        owner = owner_of("")
        await dead.runs.begin(StoredRun("r1", owner, "order-1", "f1", "running", "m", "cntr_1", 0))
        assert await dead.runs.save_checkpoint("r1", "a conversation")
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        deleted = (await http.delete("/v1/runs/r1")).json()
    with connected(tmp_path) as database:
        assert database.exec_driver_sql("SELECT checkpoint FROM runs").all() == []
    assert (deleted["status"], deleted["error"]["code"]) == ("failed", "run_lost")


@sqlite_only
async def test_request_waiting_for_a_run_of_another_process_may_be_retried_if_the_run_is_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("42")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        http_client(one) as first_client,
        http_client(other) as second_client,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                first, second = (
                    ConcurrentRequests(first_client, group),
                    ConcurrentRequests(second_client, group),
                )
                first.begin(KEY)
                await backend.arrived(1)
                second.begin(KEY)
                await until(lambda: "a client has subscribed again" in caplog.text)
                (run_id,) = re.findall("run (.*) started", caplog.text)
                run = f"/v1/runs/{run_id}"
                seen = [await side.get(run) for side in (first_client, second_client)]
                refused = await second_client.delete(run)
                ended = await first_client.delete(run)
            answered = await post_chat(second_client, KEY)
    assert [each.json()["status"] for each in seen] == ["running"] * 2
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_elsewhere")
    assert ended.json()["status"] == "cancelled"
    answers = [side.responses[0] for side in (first, second)]
    assert [each.json()["error"]["code"] for each in answers] == ["run_cancelled", "run_lost"]
    assert [each.headers.get("x-should-retry") for each in answers] == ["false", None]
    assert answer_text(answered) == "42"
