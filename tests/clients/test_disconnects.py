"""Runs whose client disconnects: ended, detached or cancelled, by request or by configuration."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from policies.isolation import Isolation
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import RunManager
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.sandbox import SandboxReference
from tests.clients.chat_http import (
    BODY,
    FIRST,
    PATH,
    SECOND,
    ConcurrentRequests,
    answer_text,
    disconnect_after,
    http_client,
    post_chat,
)
from tests.e2e.leftovers import gone, tasks
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.memory_sandbox import MemoryLease, MemorySandboxes
from tests.fakes.server import AT_ONCE, EachKey, make_services, model_client, running_proxy, serve

NEVER = "Never said."
KEY = {"Idempotency-Key": "order-1"}
DETACH = {"X-Sandbox-On-Disconnect": "detach"}
NO_HEADERS: dict[str, str] = {}


# Cancelled


@pytest.mark.parametrize(
    ("headers", "stream", "grace_s"),
    [
        (NO_HEADERS, False, 3600),
        (NO_HEADERS, True, 3600),
        (FIRST, True, 3600),  # an SDK does not retry a stream that has started
        (FIRST, False, 0.01),
        (SECOND, False, 0.01),
        (KEY, True, 0.01),
    ],
)
async def test_run_ends_after_a_disconnect_if_no_retry_can_join_it(
    headers: dict[str, str], stream: bool, grace_s: float, tmp_path: Path
) -> None:
    make_runs = partial(RunManager, grace_s=grace_s)
    async with (
        scripted_backend([Held(text_reply(NEVER), asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url,
    ):
        with anyio.fail_after(20):
            seen = await disconnect_after(backend, 1, url, headers, stream=stream)
            await seen.gone.wait()


class SlowClosingSandboxes(MemorySandboxes):
    """In-memory sandboxes that close only when `may_close` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_close = asyncio.Event()

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator[MemoryLease]:
        async with super().lease(isolation, on_decision, check_target, owner) as lease:
            try:
                yield lease
            finally:
                await self.may_close.wait()


async def test_retry_during_cancellation_starts_another_run(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("42")]
    async with scripted_backend(script) as backend:
        sandboxes, model = SlowClosingSandboxes(), model_client(backend)
        services = make_services(
            model, sandboxes, tmp_path, make_runs=partial(RunManager, grace_s=0), profiles=AT_ONCE
        )
        with anyio.fail_after(20):
            async with serve(services) as url, http_client(url) as http:
                seen = await disconnect_after(backend, 1, url, KEY)
                await seen.gone.wait()
                async with anyio.create_task_group() as group:
                    requests = ConcurrentRequests(http, group)
                    requests.begin(KEY)
                    await backend.arrived(2)
                    sandboxes.may_close.set()
        await model.aclose()
    assert answer_text(requests.responses[0]) == "42"
    assert (sandboxes.opened, sandboxes.closed) == (2, 2)


async def test_run_continues_for_its_remaining_subscriber(tmp_path: Path) -> None:
    release = asyncio.Event()
    make_runs = partial(RunManager, grace_s=0)
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url,
        http_client(url) as http,
        anyio.create_task_group() as group,
    ):
        with anyio.fail_after(20):
            requests = ConcurrentRequests(http, group)
            async with http.stream("POST", PATH, json={**BODY, "stream": True}, headers=KEY):
                requests.begin(KEY)
                other = {**BODY, "stream": True}
                async with http.stream("POST", PATH, json=other, headers=KEY) as remaining:
                    await disconnect_after(backend, 1, url, KEY)
                    release.set()
                    await remaining.aread()
    assert answer_text(remaining) == answer_text(requests.responses[0]) == "42"
    assert len(backend.requests) == 1


# Detached


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "sandbox", "changes"),
    [
        (DETACH, {}, {}),
        ({}, {"on_disconnect": "detach"}, {}),
        ({}, {}, {"on_disconnect": "detach"}),
    ],
)
async def test_detached_run_continues_and_stores_its_result(
    headers: dict[str, str],
    sandbox: dict[str, str],
    changes: dict[str, Any],
    stream: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    step = tool_reply(call("execute_bash", command="echo 42"))
    async with (
        scripted_backend([step, Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, **changes) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            await disconnect_after(backend, 2, url, headers, stream=stream, sandbox=sandbox)
            (run_id,) = re.findall("run (.*) started", caplog.text)
            found = (await http.get(f"/v1/runs/{run_id}")).json()
            assert (found["status"], found["completion"]) == ("running", None)
            release.set()
            while (found := (await http.get(f"/v1/runs/{run_id}")).json())["status"] == "running":
                await anyio.lowlevel.checkpoint()
    assert (found["id"], found["object"], found["error"]) == (run_id, "run", None)
    assert found["status"] == "completed"
    assert found["completion"]["choices"][0]["message"]["content"] == "42"
    thought = found["completion"]["choices"][0]["message"]["reasoning"]
    assert thought.startswith("````console\n$ echo 42\n")
    assert found["completion"]["sandbox"]["run_id"] == run_id


async def test_detached_run_stores_its_error(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=60.0) as url,
        http_client(url) as http,
        http.stream("POST", PATH, json={**BODY, "stream": True}, headers=DETACH) as failed,
    ):
        run_id = failed.headers["x-sandbox-run"]
        await failed.aread()
        found = (await http.get(f"/v1/runs/{run_id}")).json()
    assert (found["status"], found["completion"]) == ("failed", None)
    assert found["error"]["message"] == "the script has no more"


@pytest.mark.parametrize("stream", [False, True])
async def test_run_can_be_cancelled_by_its_owner(stream: bool, tmp_path: Path) -> None:
    async with scripted_backend([Held(text_reply(NEVER), asyncio.Event())]) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        async with (
            serve(make_services(model, sandboxes, tmp_path, profiles=AT_ONCE)) as url,
            http_client(url) as http,
            anyio.create_task_group() as group,
        ):
            with anyio.fail_after(20):
                requests = ConcurrentRequests(http, group)
                headers = {**KEY, **DETACH}
                body = {**BODY, "stream": True}
                async with http.stream("POST", PATH, json=body, headers=headers) as streamed:
                    path = f"/v1/runs/{streamed.headers['x-sandbox-run']}"
                await backend.arrived(1)
                requests.begin(headers, stream=stream)
                async with http.stream("POST", PATH, json=body, headers=headers) as streamed:
                    found = (await http.delete(path)).json()
                    await streamed.aread()
                await backend.requests[0].gone.wait()
                again = (await http.delete(path)).json()
        await model.aclose()
    assert found["status"] == again["status"] == "cancelled"
    assert "run_cancelled" in streamed.text
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)


async def test_run_without_an_idempotency_key_can_be_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        scripted_backend([Held(text_reply(NEVER), asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        anyio.create_task_group() as group,
    ):
        with anyio.fail_after(20):
            requests = ConcurrentRequests(http, group)
            requests.begin()
            await backend.arrived(1)
            (run_id,) = re.findall("run (.*) started", caplog.text)
            ended = await http.delete(f"/v1/runs/{run_id}")
    assert ended.json()["status"] == "cancelled"
    assert requests.responses[0].json()["error"]["code"] == "run_cancelled"


async def test_request_of_a_cancelled_run_gets_409(tmp_path: Path) -> None:
    async with (
        scripted_backend([Held(text_reply(NEVER), asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(KEY)
                await backend.arrived(1)
                body = {**BODY, "stream": True}
                async with http.stream("POST", PATH, json=body, headers=KEY) as streamed:
                    await http.delete(f"/v1/runs/{streamed.headers['x-sandbox-run']}")
    response = requests.responses[0]
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
    assert response.json()["error"]["code"] == "run_cancelled"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_run_of_another_key_is_not_found(method: str, tmp_path: Path) -> None:
    mine, yours = ({"Authorization": f"Bearer sk-{who}"} for who in ("mine", "yours"))
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        path = f"/v1/runs/{(await post_chat(http, {**mine, **DETACH})).headers['x-sandbox-run']}"
        assert (await http.request(method, path, headers=yours)).status_code == 404
        assert (await http.request(method, path, headers=mine)).json()["status"] == "completed"


async def test_delivered_answer_is_not_stored(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, FIRST)).headers["x-sandbox-run"]
        found = (await http.get(f"/v1/runs/{run_id}")).json()
    assert (found["status"], found["completion"]) == ("completed", None)


async def test_detached_run_ends_when_the_server_stops(tmp_path: Path) -> None:
    async with scripted_backend([Held(text_reply(NEVER), asyncio.Event())]) as backend:
        at_first = tasks()
        sandboxes, model = MemorySandboxes(), model_client(backend)
        with anyio.fail_after(20):
            async with serve(make_services(model, sandboxes, tmp_path, profiles=AT_ONCE)) as url:
                seen = await disconnect_after(backend, 1, url, DETACH)
            await seen.gone.wait()
            await model.aclose()
            await gone(lambda: tasks() - at_first)
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)
