"""Retries at every point of a run: one run, one answer, and no sandbox left open."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import TaskGroup

from proxy.agent.agent import Agent
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import RunManager
from proxy.store.database import Database
from proxy.store.records import StoredRun
from proxy.store.runs import RunRepository
from sandbox_runtime.ownership import Owner
from tests.clients.chat_http import (
    FIRST,
    SECOND,
    ConcurrentRequests,
    answer_text,
    disconnect_after,
    http_client,
    post_chat,
)
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve
from tests.fakes.waiting import until
from tests.stores import database_of

KEY = {"Idempotency-Key": "order-1"}
TEXT = "It is forty-two, as everybody knows by now."
STEP = tool_reply(call("execute_bash", command="echo 42"))
FAILURE = {"error": {"message": "It cannot.", "status": 400}}
IN_PROGRESS = ("first call", "last call", "amid the answer")
ENDED = ("on its way to the store", "in the store")


class HeldRunRepository(RunRepository):
    """A run repository that stores a final result only when `may_end` is set."""

    def __init__(self, directory: Path) -> None:
        self._directory = Database(database_of(directory))
        self._holder = Owner(directory)
        super().__init__(self._directory, time.time, self._holder)
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()
        self.ended = asyncio.Event()

    async def end(self, run: StoredRun, *, keep_s: float, for_retry: bool) -> None:
        self.ending.set()
        await self.may_end.wait()
        await super().end(run, keep_s=keep_s, for_retry=for_retry)
        self.ended.set()

    def close(self) -> None:
        self._directory.close()
        self._holder.release()


@dataclass
class HeldRun:
    """A server whose run can be held at a chosen point."""

    url: str
    http: httpx.AsyncClient
    backend: ScriptedBackend
    repository: HeldRunRepository
    release: asyncio.Event
    requests: ConcurrentRequests

    async def begin(
        self, point: str, headers: Mapping[str, str], *, disconnects: bool, stream: bool
    ) -> None:
        """Bring a run to the given point, with its client connected or gone."""
        calls = 1 if point == "first call" else 2
        if disconnects:
            await disconnect_after(self.backend, calls, self.url, headers, stream=stream)
        else:
            self.requests.begin(headers, stream=stream)
            await self.backend.arrived(calls)
        if point in ENDED:
            self.release.set()
            await self.repository.ending.wait()
        if point == "in the store":
            self.repository.may_end.set()
            await self.repository.ended.wait()

    def go_on(self) -> None:
        """Release the run."""
        self.release.set()
        self.repository.may_end.set()


@asynccontextmanager
async def held_run(
    point: str, last: Item, *more: Item, state_dir: Path, group: TaskGroup
) -> AsyncIterator[HeldRun]:
    """Yield a server whose second model call returns `last`; all sandboxes must be closed at the
    end.
    """
    release, sandboxes = asyncio.Event(), MemorySandboxes()
    script: Sequence[Item]
    assert isinstance(last, dict)
    if point == "first call":
        script = [Held(STEP, release), last]
    else:
        script = [STEP, Held(last, release, after_pieces=2 * (point == "amid the answer"))]
    async with scripted_backend([*script, *more]) as backend:
        model, repository = model_client(backend), HeldRunRepository(state_dir)

        def make_runs(
            agent: Agent, suspended_runs: SuspendedRunStore, _: RunRepository
        ) -> RunManager:
            return RunManager(agent, suspended_runs, repository, grace_s=3600)

        services = make_services(model, sandboxes, state_dir, make_runs=make_runs)
        with anyio.fail_after(20):
            async with serve(services) as url, http_client(url) as http:
                yield HeldRun(
                    url, http, backend, repository, release, ConcurrentRequests(http, group)
                )
            await model.aclose()
        repository.close()
    assert sandboxes.opened == sandboxes.closed


@pytest.mark.parametrize("point", [*IN_PROGRESS, *ENDED])
@pytest.mark.parametrize("disconnects", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_request_with_the_same_idempotency_key_joins_the_run_at_every_point(
    stream: bool, disconnects: bool, point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        held_run(point, text_reply(TEXT), state_dir=tmp_path, group=group) as run,
    ):
        await run.begin(point, KEY, disconnects=disconnects, stream=True)
        run.requests.begin(KEY, stream=stream)
        await until(lambda: "a client has subscribed again" in caplog.text)
        run.go_on()
        again = await post_chat(run.http, KEY)
        await until(lambda: len(run.requests.responses) == (1 if disconnects else 2))
        found = [*run.requests.responses.values(), again]
        assert {answer_text(each) for each in found} == {TEXT}
        assert len({each.headers["x-sandbox-run"] for each in found}) == 1
        assert len(run.backend.requests) == 2


@pytest.mark.parametrize("point", ["first call", "last call", *ENDED])
async def test_sdk_retry_joins_the_abandoned_run_at_every_point(
    point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        held_run(
            point, text_reply(TEXT), text_reply("New."), state_dir=tmp_path, group=group
        ) as run,
    ):
        await run.begin(point, FIRST, disconnects=True, stream=False)
        run.requests.begin(SECOND, stream=False)
        await until(lambda: "a client has subscribed again" in caplog.text)
        run.go_on()
        await until(lambda: len(run.requests.responses) == 1)
        assert answer_text(run.requests.responses[0]) == TEXT
        assert len(run.backend.requests) == 2
        assert (
            answer_text(await post_chat(run.http, SECOND, stream=False)) == "New."
        )  # an answer that was delivered is not delivered again


@pytest.mark.parametrize("point", ["first call", "last call"])
@pytest.mark.parametrize(("first", "again"), [(KEY, KEY), (FIRST, SECOND)])
async def test_retry_that_joins_a_failing_run_gets_its_error_and_the_next_retry_starts_a_new_run(
    first: dict[str, str],
    again: dict[str, str],
    point: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        held_run(point, FAILURE, text_reply("New."), state_dir=tmp_path, group=group) as run,
    ):
        await run.begin(point, first, disconnects=True, stream=False)
        run.requests.begin(again, stream=False)
        await until(lambda: "a client has subscribed again" in caplog.text)
        run.go_on()
        await until(lambda: len(run.requests.responses) == 1)
        failed = run.requests.responses[0]
        assert (failed.status_code, failed.json()["error"]["message"]) == (400, "It cannot.")
        assert answer_text(await post_chat(run.http, again, stream=False)) == "New."
        assert len(run.backend.requests) == 3


@pytest.mark.parametrize("point", ENDED)
async def test_idempotency_key_of_a_failed_run_starts_a_new_run(point: str, tmp_path: Path) -> None:
    async with (
        anyio.create_task_group() as group,
        held_run(point, FAILURE, text_reply("New."), state_dir=tmp_path, group=group) as run,
    ):
        await run.begin(point, KEY, disconnects=False, stream=False)
        assert answer_text(await post_chat(run.http, KEY)) == "New."
        run.go_on()
        assert answer_text(await post_chat(run.http, KEY)) == "New."
        assert len(run.backend.requests) == 3


@pytest.mark.parametrize("point", IN_PROGRESS)
async def test_idempotency_key_of_a_cancelled_run_starts_a_new_run(
    point: str, tmp_path: Path
) -> None:
    async with (
        anyio.create_task_group() as group,
        held_run(
            point, text_reply(TEXT), text_reply("New."), state_dir=tmp_path, group=group
        ) as run,
    ):
        body = {"messages": [{"role": "user", "content": "How many?"}], "stream": True}
        payload = {"model": "fake-model", **body}
        path = "/v1/chat/completions"
        async with run.http.stream("POST", path, json=payload, headers=KEY) as begun:
            await run.backend.arrived(1 if point == "first call" else 2)
            await run.http.delete(f"/v1/runs/{begun.headers['x-sandbox-run']}")
            await begun.aread()
        run.go_on()
        # The new run gets the reply that the first run would have received next.
        expected = TEXT if point == "first call" else "New."
        assert answer_text(await post_chat(run.http, KEY)) == expected
        assert "run_cancelled" in begun.text
