"""A request that comes again at every point of its run: one run, one answer, nothing left over."""

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
from proxy.agent.suspension import SuspendedRunStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import RunManager
from proxy.store.database import Database
from proxy.store.records import StoredRun
from proxy.store.runs import RunRepository
from sandbox_runtime.ownership import Owner
from tests.clients.chat import FIRST, SECOND, Asking, answer, ask, client, leave_after
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve
from tests.fakes.waiting import until

KEY = {"Idempotency-Key": "order-1"}
TEXT = "It is forty-two, as everybody knows by now."
STEP = tool_reply(call("execute_bash", command="echo 42"))
FAILURE = {"error": {"message": "It cannot.", "status": 400}}
AT_WORK = ("first call", "last call", "amid the answer")
ENDED = ("on its way to the store", "in the store")


class HeldShelf(RunRepository):
    """Lets what came of a run into the store when `may_end` is set."""

    def __init__(self, directory: Path) -> None:
        self._directory = Database(directory / "store.sqlite3")
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
class Scene:
    """A server whose runs can be stopped on the way."""

    url: str
    http: httpx.AsyncClient
    backend: ScriptedBackend
    repository: HeldShelf
    release: asyncio.Event
    asking: Asking

    async def begin(
        self, point: str, headers: Mapping[str, str], *, leaves: bool, stream: bool
    ) -> None:
        """Have a run come to that point, its client there or gone."""
        calls = 1 if point == "first call" else 2
        if leaves:
            await leave_after(self.backend, calls, self.url, headers, stream=stream)
        else:
            self.asking.begin(headers, stream=stream)
            await self.backend.arrived(calls)
        if point in ENDED:
            self.release.set()
            await self.repository.ending.wait()
        if point == "in the store":
            self.repository.may_end.set()
            await self.repository.ended.wait()

    def go_on(self) -> None:
        """Stop it no more."""
        self.release.set()
        self.repository.may_end.set()


@asynccontextmanager
async def scene(
    point: str, last: Item, *more: Item, state_dir: Path, group: TaskGroup
) -> AsyncIterator[Scene]:
    """`last` is what the model says at its second call; with the server all sandboxes end."""
    release, sandboxes = asyncio.Event(), MemorySandboxes()
    script: Sequence[Item]
    assert isinstance(last, dict)
    if point == "first call":
        script = [Held(STEP, release), last]
    else:
        script = [STEP, Held(last, release, after_pieces=2 * (point == "amid the answer"))]
    async with scripted_backend([*script, *more]) as backend:
        model, repository = model_client(backend), HeldShelf(state_dir)

        def make_runs(
            agent: Agent, suspended_runs: SuspendedRunStore, _: RunRepository
        ) -> RunManager:
            return RunManager(agent, suspended_runs, repository, grace_s=3600)

        services = make_services(model, sandboxes, state_dir, make_runs=make_runs)
        with anyio.fail_after(20):
            async with serve(services) as url, client(url) as http:
                yield Scene(url, http, backend, repository, release, Asking(http, group))
            await model.aclose()
        repository.close()
    assert sandboxes.opened == sandboxes.closed


@pytest.mark.parametrize("point", [*AT_WORK, *ENDED])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_key_at_every_point_is_the_same_run(
    stream: bool, leaves: bool, point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        scene(point, text_reply(TEXT), state_dir=tmp_path, group=group) as at,
    ):
        await at.begin(point, KEY, leaves=leaves, stream=True)
        at.asking.begin(KEY, stream=stream)
        await until(lambda: "a client has subscribed again" in caplog.text)
        at.go_on()
        again = await ask(at.http, KEY)
        await until(lambda: len(at.asking.responses) == (1 if leaves else 2))
        found = [*at.asking.responses.values(), again]
        assert {answer(each) for each in found} == {TEXT}
        assert len({each.headers["x-sandbox-run"] for each in found}) == 1
        assert len(at.backend.requests) == 2


@pytest.mark.parametrize("point", ["first call", "last call", *ENDED])
async def test_a_retry_of_an_sdk_at_every_point_gets_the_run_that_its_client_left(
    point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        scene(point, text_reply(TEXT), text_reply("New."), state_dir=tmp_path, group=group) as at,
    ):
        await at.begin(point, FIRST, leaves=True, stream=False)
        at.asking.begin(SECOND, stream=False)
        await until(lambda: "a client has subscribed again" in caplog.text)
        at.go_on()
        await until(lambda: len(at.asking.responses) == 1)
        assert answer(at.asking.responses[0]) == TEXT
        assert len(at.backend.requests) == 2
        assert (
            answer(await ask(at.http, SECOND, stream=False)) == "New."
        )  # what was heard is nobody else's


@pytest.mark.parametrize("point", ["first call", "last call"])
@pytest.mark.parametrize(("first", "again"), [(KEY, KEY), (FIRST, SECOND)])
async def test_who_joins_a_run_that_then_fails_hears_why_and_may_ask_again(
    first: dict[str, str],
    again: dict[str, str],
    point: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with (
        anyio.create_task_group() as group,
        scene(point, FAILURE, text_reply("New."), state_dir=tmp_path, group=group) as at,
    ):
        await at.begin(point, first, leaves=True, stream=False)
        at.asking.begin(again, stream=False)
        await until(lambda: "a client has subscribed again" in caplog.text)
        at.go_on()
        await until(lambda: len(at.asking.responses) == 1)
        failed = at.asking.responses[0]
        assert (failed.status_code, failed.json()["error"]["message"]) == (400, "It cannot.")
        assert answer(await ask(at.http, again, stream=False)) == "New."
        assert len(at.backend.requests) == 3


@pytest.mark.parametrize("point", ENDED)
async def test_what_has_failed_is_begun_anew_though_it_is_kept(point: str, tmp_path: Path) -> None:
    async with (
        anyio.create_task_group() as group,
        scene(point, FAILURE, text_reply("New."), state_dir=tmp_path, group=group) as at,
    ):
        await at.begin(point, KEY, leaves=False, stream=False)
        assert answer(await ask(at.http, KEY)) == "New."
        at.go_on()
        assert answer(await ask(at.http, KEY)) == "New."
        assert len(at.backend.requests) == 3


@pytest.mark.parametrize("point", AT_WORK)
async def test_what_was_cancelled_is_begun_anew(point: str, tmp_path: Path) -> None:
    async with (
        anyio.create_task_group() as group,
        scene(point, text_reply(TEXT), text_reply("New."), state_dir=tmp_path, group=group) as at,
    ):
        body = {"messages": [{"role": "user", "content": "How many?"}], "stream": True}
        asked = {"model": "fake-model", **body}
        path = "/v1/chat/completions"
        async with at.http.stream("POST", path, json=asked, headers=KEY) as begun:
            await at.backend.arrived(1 if point == "first call" else 2)
            await at.http.delete(f"/v1/runs/{begun.headers['x-sandbox-run']}")
            await begun.aread()
        at.go_on()
        # What would have been the first one's next reply is the new run's.
        expected = TEXT if point == "first call" else "New."
        assert answer(await ask(at.http, KEY)) == expected
        assert "run_cancelled" in begun.text
