"""Retries of background responses: which ones return the first response and which ones start
another.
"""

import asyncio
from functools import partial
from pathlib import Path

import anyio
import httpx

from proxy.agent.agent import Agent
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.agent.task import AgentTask
from proxy.models.scripted import text_reply
from proxy.runs.manager import RunManager
from proxy.runs.run import RequestIdentity, Subscriber
from proxy.store.runs import RunRepository
from tests.clients.responses_sdk import (
    MODEL,
    api_error,
    create_response,
    replay_events,
    responses_client,
    stream_events,
    wait_until_finished,
)
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.waiting import until
from tests.stores import sqlite_only

KEY = {"Idempotency-Key": "order-1"}
NEVER = "Never said."


async def test_retry_with_the_same_idempotency_key_returns_the_first_response(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("42."), release)]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            made = await create_response(mine, "How many?", background=True, extra_headers=KEY)
            await backend.arrived(1)
            async with anyio.create_task_group() as group:
                group.start_soon(stream_events, mine, "How many?", KEY)
                again = await create_response(mine, "How many?", background=True, extra_headers=KEY)
                release.set()
            await wait_until_finished(mine, made.id)
            late = await create_response(mine, "How many?", background=True, extra_headers=KEY)
            events = await stream_events(mine, "How many?", KEY)
            retrieved = await mine.responses.retrieve(made.id)
        async with responses_client(backend, tmp_path) as mine:
            restarted = await create_response(mine, "How many?", background=True, extra_headers=KEY)
            assert await stream_events(mine, "How many?", KEY) == events
    assert {made.id, again.id, late.id, restarted.id} == {made.id}
    assert (again.status, late.status) == ("queued", "completed")
    assert late == restarted == retrieved
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["id"] == made.id
    assert len(backend.requests) == 1


async def test_retry_at_another_process_returns_the_first_response(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("42."), release)]
    async with (
        scripted_backend(script) as backend,
        responses_client(backend, tmp_path) as here,
        responses_client(backend, tmp_path) as there,
    ):
        made = await create_response(here, "How many?", background=True, extra_headers=KEY)
        await backend.arrived(1)
        again = await create_response(there, "How many?", background=True, extra_headers=KEY)
        assert (again.id, again.status) == (made.id, "queued")
        release.set()
        ended = await wait_until_finished(there, made.id)
        assert ended == await wait_until_finished(here, made.id)
        assert await stream_events(there, "How many?", KEY) == await replay_events(here, made.id)
    assert ended.output_text == "42."
    assert len(backend.requests) == 1


@sqlite_only  # with PostgreSQL the other process streams it: see test_replicas
async def test_other_process_cannot_stream_a_response_in_progress(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42."), release)]) as backend,
        responses_client(backend, tmp_path) as here,
        responses_client(backend, tmp_path) as there,
    ):
        made = await create_response(here, "How many?", background=True, extra_headers=KEY)
        await backend.arrived(1)
        for refusal in (
            stream_events(there, "How many?", KEY),
            there.responses.retrieve(made.id, stream=True),
        ):
            error = await api_error(refusal)
            assert (error.status_code, error.code) == (409, "run_elsewhere")
        release.set()
        await wait_until_finished(there, made.id)


async def test_idempotency_key_of_a_failed_or_cancelled_response_starts_a_new_response(
    tmp_path: Path,
) -> None:
    script = [Refusal(400, "no"), Held(text_reply(NEVER), asyncio.Event()), text_reply("42.")]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        failed = await create_response(mine, "How many?", background=True, extra_headers=KEY)
        assert (await wait_until_finished(mine, failed.id)).status == "failed"
        cancelled = await create_response(mine, "How many?", background=True, extra_headers=KEY)
        await backend.arrived(2)
        assert (await mine.responses.cancel(cancelled.id)).status == "cancelled"
        events = await stream_events(mine, "How many?", KEY)
    assert events[-1]["type"] == "response.completed"
    assert len({failed.id, cancelled.id, events[-1]["response"]["id"]}) == 3


async def test_idempotency_key_of_a_deleted_response_starts_a_new_response(tmp_path: Path) -> None:
    script = [text_reply("42."), text_reply("43.")]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?", background=True, extra_headers=KEY)
        await wait_until_finished(mine, made.id)
        await mine.responses.delete(made.id)
        another = await create_response(mine, "How many?", background=True, extra_headers=KEY)
        assert another.id != made.id
        assert (await wait_until_finished(mine, another.id)).output_text == "43."


async def test_sdk_retry_does_not_join_a_response_that_was_already_delivered(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("1."), release), text_reply("2."), text_reply("3.")]
    first, retry = ({"x-stainless-retry-count": count} for count in "01")
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        first_response = await create_response(
            mine, "How many?", background=True, extra_headers=first
        )
        await backend.arrived(1)
        second_response = await create_response(
            mine, "How many?", background=True, extra_headers=retry
        )
        release.set()
        for made in (first_response, second_response):
            await wait_until_finished(mine, made.id)
        third_response = await create_response(
            mine, "How many?", background=True, extra_headers=retry
        )
        await wait_until_finished(mine, third_response.id)
    assert len({first_response.id, second_response.id, third_response.id}) == 3


class HeldRunManager(RunManager):
    """A run manager that holds each join and start until `release` is set."""

    def __init__(
        self, agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> None:
        super().__init__(agent, suspended_runs, repository)
        self.entered: list[str] = []
        self.release = asyncio.Event()

    async def join(self, identity: RequestIdentity) -> Subscriber | None:
        subscriber = await super().join(identity)
        return await self._hold(subscriber) if subscriber else None

    async def start(self, identity: RequestIdentity, task: AgentTask) -> Subscriber:
        return await self._hold(await super().start(identity, task))

    async def _hold(self, subscriber: Subscriber) -> Subscriber:
        self.entered.append(subscriber.run.id)
        await self.release.wait()
        return subscriber


@sqlite_only
async def test_retry_gets_the_response_of_a_first_request_that_disconnected_before_its_answer(
    tmp_path: Path,
) -> None:
    body = {"model": MODEL, "input": "How many?", "background": True}
    made: list[HeldRunManager] = []

    def make_runs(
        agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> RunManager:
        made.append(HeldRunManager(agent, suspended_runs, repository))
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
            await http.get("/health")  # lets the server notice the disconnect
            made[0].release.set()
            again = await http.post("/v1/responses", json=body, headers={count: "1"})
            assert again.json()["id"] == f"resp_{made[0].entered[0]}"


async def test_sdk_retry_does_not_join_a_response_that_was_deleted_before_its_client_disconnected(
    tmp_path: Path,
) -> None:
    body = {"model": MODEL, "input": "How many?", "background": True}
    made: list[HeldRunManager] = []

    def make_runs(
        agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> RunManager:
        made.append(HeldRunManager(agent, suspended_runs, repository))
        return made[0]

    async with (
        scripted_backend([text_reply("42."), text_reply("43.")]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        with anyio.fail_after(30):
            request = partial(http.post, "/v1/responses", json=body)
            first = asyncio.create_task(request(headers={"x-stainless-retry-count": "0"}))
            await until(lambda: len(made[0].entered) == 1)
            path = f"/v1/responses/resp_{made[0].entered[0]}"
            while (await http.get(path)).json().get("status") != "completed":
                await anyio.lowlevel.checkpoint()
            assert (await http.delete(path)).json()["deleted"]
            first.cancel()
            await asyncio.wait([first])
            await http.get("/health")  # lets the server notice the disconnect
            made[0].release.set()
            again = await request(headers={"x-stainless-retry-count": "1"})
            assert again.json()["id"] != f"resp_{made[0].entered[0]}"
