"""Requests for a response in the background that come again: the same response, or another."""

import asyncio
from pathlib import Path

import anyio
import httpx

from proxy.agent.agent import Agent
from proxy.agent.suspension import SuspendedRunStore
from proxy.agent.task import AgentTask
from proxy.models.scripted import text_reply
from proxy.runs.manager import RunManager
from proxy.runs.run import RequestIdentity, Subscriber
from proxy.store.runs import RunRepository
from tests.clients.responses import MODEL, ask, client, over, refused, streamed, told_again
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.waiting import until

KEY = {"Idempotency-Key": "order-1"}
NEVER = "Never said."


async def test_a_request_that_comes_again_is_one_response(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("42."), release)]
    async with scripted_backend(script) as backend:
        async with client(backend, tmp_path) as mine:
            made = await ask(mine, "How many?", background=True, extra_headers=KEY)
            await backend.arrived(1)
            async with anyio.create_task_group() as group:
                group.start_soon(streamed, mine, "How many?", KEY)
                again = await ask(mine, "How many?", background=True, extra_headers=KEY)
                release.set()
            await over(mine, made.id)
            late = await ask(mine, "How many?", background=True, extra_headers=KEY)
            told = await streamed(mine, "How many?", KEY)
            retrieved = await mine.responses.retrieve(made.id)
        async with client(backend, tmp_path) as mine:
            restarted = await ask(mine, "How many?", background=True, extra_headers=KEY)
            assert await streamed(mine, "How many?", KEY) == told
    assert {made.id, again.id, late.id, restarted.id} == {made.id}
    assert (again.status, late.status) == ("queued", "completed")
    assert late == restarted == retrieved
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["id"] == made.id
    assert len(backend.requests) == 1


async def test_a_request_that_comes_again_to_another_process_is_one_response(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("42."), release)]
    async with (
        scripted_backend(script) as backend,
        client(backend, tmp_path) as here,
        client(backend, tmp_path) as there,
    ):
        made = await ask(here, "How many?", background=True, extra_headers=KEY)
        await backend.arrived(1)
        again = await ask(there, "How many?", background=True, extra_headers=KEY)
        assert (again.id, again.status) == (made.id, "queued")
        for refusal in (
            streamed(there, "How many?", KEY),
            there.responses.retrieve(made.id, stream=True),
        ):
            error = await refused(refusal)
            assert (error.status_code, error.code) == (409, "run_elsewhere")
        release.set()
        ended = await over(there, made.id)
        assert ended == await over(here, made.id)
        assert await streamed(there, "How many?", KEY) == await told_again(here, made.id)
    assert ended.output_text == "42."
    assert len(backend.requests) == 1


async def test_a_key_of_a_response_that_failed_or_was_cancelled_begins_another(
    tmp_path: Path,
) -> None:
    script = [Refusal(400, "no"), Held(text_reply(NEVER), asyncio.Event()), text_reply("42.")]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        failed = await ask(mine, "How many?", background=True, extra_headers=KEY)
        assert (await over(mine, failed.id)).status == "failed"
        cancelled = await ask(mine, "How many?", background=True, extra_headers=KEY)
        await backend.arrived(2)
        assert (await mine.responses.cancel(cancelled.id)).status == "cancelled"
        told = await streamed(mine, "How many?", KEY)
    assert told[-1]["type"] == "response.completed"
    assert len({failed.id, cancelled.id, told[-1]["response"]["id"]}) == 3


async def test_a_key_of_a_response_that_was_deleted_begins_another(tmp_path: Path) -> None:
    script = [text_reply("42."), text_reply("43.")]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True, extra_headers=KEY)
        await over(mine, made.id)
        await mine.responses.delete(made.id)
        another = await ask(mine, "How many?", background=True, extra_headers=KEY)
        assert another.id != made.id
        assert (await over(mine, another.id)).output_text == "43."


async def test_a_response_that_its_client_was_told_of_is_not_somebody_else_s(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("1."), release), text_reply("2."), text_reply("3.")]
    first, retry = ({"x-stainless-retry-count": count} for count in "01")
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        one = await ask(mine, "How many?", background=True, extra_headers=first)
        await backend.arrived(1)
        two = await ask(mine, "How many?", background=True, extra_headers=retry)
        release.set()
        for made in (one, two):
            await over(mine, made.id)
        three = await ask(mine, "How many?", background=True, extra_headers=retry)
        await over(mine, three.id)
    assert len({one.id, two.id, three.id}) == 3


class HeldUpRuns(RunManager):
    """Runs whose requests are answered only when `release` is set."""

    def __init__(
        self, agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> None:
        super().__init__(agent, suspended_runs, repository)
        self.entered: list[str] = []
        self.release = asyncio.Event()

    async def join(self, identity: RequestIdentity) -> Subscriber | None:
        subscriber = await super().join(identity)
        return await self._held_up(subscriber) if subscriber else None

    async def start(self, identity: RequestIdentity, task: AgentTask) -> Subscriber:
        return await self._held_up(await super().start(identity, task))

    async def _held_up(self, subscriber: Subscriber) -> Subscriber:
        self.entered.append(subscriber.run.id)
        await self.release.wait()
        return subscriber


async def test_who_left_before_it_was_told_of_a_response_and_asks_again_is_told_of_it(
    tmp_path: Path,
) -> None:
    body = {"model": MODEL, "input": "How many?", "background": True}
    made: list[HeldUpRuns] = []

    def make_runs(
        agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> RunManager:
        made.append(HeldUpRuns(agent, suspended_runs, repository))
        return made[0]

    async with (
        scripted_backend([text_reply("42."), text_reply("43.")]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        count = "x-stainless-retry-count"
        with anyio.fail_after(30):
            asking = asyncio.create_task(
                http.post("/v1/responses", json=body, headers={count: "0"})
            )
            await until(lambda: len(made[0].entered) == 1)
            asking.cancel()
            await asyncio.wait([asking])
            await http.get("/health")  # it is seen that the client has gone
            made[0].release.set()
            again = await http.post("/v1/responses", json=body, headers={count: "1"})
            assert again.json()["id"] == f"resp_{made[0].entered[0]}"
