"""What came of a run is there after a restart, and for every process that shares the state."""

import asyncio
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import KEEP_S, RunManager
from proxy.store.store import Store
from tests.clients.chat import (
    FIRST,
    SECOND,
    Asking,
    answer,
    ask,
    client,
    leave_after,
    reasoning,
)
from tests.fakes.backend import Held, Refusal, ScriptedBackend, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import ATTEMPTS, running_proxy
from tests.fakes.waiting import until

KEY = {"Idempotency-Key": "order-1"}
DETACH = {"X-Sandbox-On-Disconnect": "detach"}
NEVER = "Never said."
STEP = tool_reply(call("execute_bash", command="echo 42; echo data > output/data"))


async def asked(
    backend: ScriptedBackend, state_dir: Path, headers: Mapping[str, str], **body: Any
) -> httpx.Response:
    """What a server of its own answers, which then ends."""
    async with (
        running_proxy(backend, "memory", state_dir, status_wait_s=60.0) as url,
        client(url) as http,
    ):
        return await ask(http, headers, **body)


async def looked_up(backend: ScriptedBackend, state_dir: Path, run_id: str) -> Any:
    """The same of `GET /v1/runs/{id}`."""
    async with running_proxy(backend, "memory", state_dir) as url, client(url) as http:
        return (await http.get(f"/v1/runs/{run_id}")).json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_a_key_s_result_outlives_the_server(
    stream: bool, again: bool, tmp_path: Path
) -> None:
    async with scripted_backend([STEP, text_reply("42")]) as backend:
        first = await asked(backend, tmp_path, KEY, stream=stream)
        second = await asked(backend, tmp_path, KEY, stream=again)
        third = await asked(backend, tmp_path, KEY, stream=again)
    assert {answer(found) for found in (first, second, third)} == {"42"}
    assert {reasoning(found).partition("[exit 0")[0] for found in (first, second)} == {
        "````console\n$ echo 42; echo data > output/data\n42\n"
    }
    names = ("x-sandbox-run", "x-sandbox-container")
    assert [first.headers[name] for name in names] == [second.headers[name] for name in names]
    assert second.text == third.text
    if not (stream or again):
        assert first.json() == second.json()
    assert len(backend.requests) == 2


@pytest.mark.parametrize("later_s", [KEEP_S - 1, KEEP_S])
async def test_a_result_that_is_too_old_is_made_anew(later_s: float, tmp_path: Path) -> None:
    clock, answers = ManualClock(), []
    async with scripted_backend([text_reply("one"), text_reply("two")]) as backend:
        for _ in range(2):
            files = FileStore(Store(tmp_path, now=clock.time), limits=ArtifactLimits())
            async with (
                running_proxy(backend, "memory", tmp_path, files=files) as url,
                client(url) as http,
            ):
                answers.append(answer(await ask(http, KEY)))
            clock.advance(later_s)
    assert answers == ["one", "one" if later_s < KEEP_S else "two"]


async def test_a_key_stands_for_one_request_after_a_restart_too(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        await asked(backend, tmp_path, KEY)
        other = await asked(backend, tmp_path, KEY, temperature=0.1)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_of_all_choices_what_came_of_them_is_kept(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("one"), text_reply("two")]) as backend:
        first = await asked(backend, tmp_path, KEY, n=2)
        second = await asked(backend, tmp_path, KEY, n=2)
    assert len(first.json()["choices"]) == 2
    assert first.json() == second.json()


async def test_a_retry_of_an_sdk_gets_once_what_its_client_has_not_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), text_reply("two")]
    async with scripted_backend(script) as backend:
        make_runs = partial(RunManager, grace_s=3600)
        async with running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url:
            with anyio.fail_after(20):
                await leave_after(backend, 1, url, FIRST)
                release.set()
                await until(lambda: "ended: answered" in caplog.text)
        answers = [answer(await asked(backend, tmp_path, SECOND)) for _ in range(2)]
    assert answers == ["one", "two"]


@pytest.mark.parametrize("headers", [DETACH, {**DETACH, **KEY}])
async def test_a_detached_run_is_found_after_a_restart(
    headers: dict[str, str], tmp_path: Path
) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        first = await asked(backend, tmp_path, headers)
        found = await looked_up(backend, tmp_path, first.headers["x-sandbox-run"])
    assert (found["status"], found["error"]) == ("completed", None)
    assert found["completion"] == first.json()


async def test_how_a_detached_run_failed_is_told_after_a_restart(tmp_path: Path) -> None:
    async with scripted_backend([Refusal(418, "a teapot", code="teapot")]) as backend:
        first = await asked(backend, tmp_path, DETACH, stream=True)
        found = await looked_up(backend, tmp_path, first.headers["x-sandbox-run"])
    assert (found["status"], found["completion"]) == ("failed", None)
    assert found["error"] == first.json()["error"]
    assert found["error"]["message"] == "a teapot"


async def test_what_failed_is_begun_anew_after_a_restart(tmp_path: Path) -> None:
    async with scripted_backend([*[Refusal(500)] * ATTEMPTS, text_reply("42")]) as backend:
        assert (await asked(backend, tmp_path, KEY)).status_code == 500
        assert answer(await asked(backend, tmp_path, KEY)) == "42"


async def test_a_run_that_ended_with_its_server_is_begun_anew(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("42")]
    headers = {**KEY, **DETACH}
    async with scripted_backend(script) as backend:
        async with running_proxy(backend, "memory", tmp_path) as url:
            with anyio.fail_after(20):
                await leave_after(backend, 1, url, headers)
        assert answer(await asked(backend, tmp_path, headers)) == "42"


# Several processes


@pytest.mark.parametrize("streams", [(False, True), (True, False)])
async def test_the_same_request_in_two_processes_is_one_run(
    streams: tuple[bool, bool], tmp_path: Path
) -> None:
    release = asyncio.Event()
    script = [STEP, Held(text_reply("42"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        client(one) as here,
        client(other) as there,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                first, second = Asking(here, group), Asking(there, group)
                first.begin(KEY, stream=streams[0])
                await backend.arrived(2)
                second.begin(KEY, stream=streams[1])
                wrong = await ask(there, KEY, temperature=0.1)
                release.set()
            later = await ask(there, KEY)
    found = [first.responses[0], second.responses[0], later]
    assert {answer(each) for each in found} == {"42"}
    assert len({reasoning(each).partition("[exit 0")[0] for each in found}) == 1
    assert len({each.headers["x-sandbox-run"] for each in found}) == 1
    assert wrong.status_code == 422
    assert len(backend.requests) == 2


async def test_many_with_one_key_in_two_processes_are_one_run(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        client(one) as here,
        client(other) as there,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                sides = [Asking(here, group), Asking(there, group)]
                for _ in range(8):
                    for side in sides:
                        side.begin(KEY)
    found = [response for side in sides for response in side.responses.values()]
    assert len(found) == 16
    assert len({each.text for each in found}) == 1
    assert len(backend.requests) == 1


async def test_of_two_processes_that_begin_one_response_none_is_left_at_work(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        client(one) as here,
        client(other) as there,
    ):
        ids = set()

        async def create(side: httpx.AsyncClient) -> None:
            body = {"model": "m", "input": "How many?"}
            ids.add((await side.post("/v1/responses", json=body, headers=KEY)).json()["id"])

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for side in (here, there) * 3:
                    group.start_soon(create, side)
        with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as rows:
            at_work = rows.execute("SELECT id FROM responses WHERE worker IS NOT NULL").fetchall()
    assert (len(ids), len(backend.requests), at_work) == (1, 1, [])


async def test_who_waits_for_a_run_of_another_process_that_is_ended_may_ask_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("42")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as one,
        running_proxy(backend, "memory", tmp_path) as other,
        client(one) as here,
        client(other) as there,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                first, second = Asking(here, group), Asking(there, group)
                first.begin(KEY)
                await backend.arrived(1)
                second.begin(KEY)
                await until(lambda: "a client has subscribed again" in caplog.text)
                (run_id,) = re.findall("run (.*) started", caplog.text)
                run = f"/v1/runs/{run_id}"
                seen = [await side.get(run) for side in (here, there)]
                refused = await there.delete(run)
                ended = await here.delete(run)
            again = await ask(there, KEY)
    assert [each.json()["status"] for each in seen] == ["running"] * 2
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_elsewhere")
    assert ended.json()["status"] == "cancelled"
    told = [side.responses[0] for side in (first, second)]
    assert [each.json()["error"]["code"] for each in told] == ["run_cancelled", "run_lost"]
    assert [each.headers.get("x-should-retry") for each in told] == ["false", None]
    assert answer(again) == "42"
