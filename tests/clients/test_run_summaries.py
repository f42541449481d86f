"""GET /v1/runs/{id} for a while after the end of a run."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.store.runs import SUMMARY_KEEP_S
from tests.clients.chat_http import http_client, post_chat
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import EachKey, running_proxy
from tests.stores import open_store

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
STEP = {**tool_reply(call("execute_bash", command="echo 42")), "usage": USAGE}
ANSWER = {**text_reply("It is 42."), "usage": USAGE}
MESSAGES = [{"role": "user", "content": "How many?"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "streamed": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "How many?"}),
    "not stored": ("/v1/responses", {"input": "How many?", "store": False}),
}


serve_with_keys = partial(running_proxy, kind="memory", keyring=EachKey())
"""Serve with a keyring that accepts each key as its own owner."""


async def run_record(http: httpx.AsyncClient, run_id: str, **headers: str) -> httpx.Response:
    return await http.get(f"/v1/runs/{run_id}", headers=headers)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
async def test_run_whose_answer_was_delivered_has_a_summary_without_the_answer(
    path: str, body: dict[str, Any], restarted: bool, tmp_path: Path
) -> None:
    async with scripted_backend([STEP, ANSWER]) as backend:
        async with serve_with_keys(backend, state_dir=tmp_path) as url, http_client(url) as http:
            answered = await http.post(path, json={"model": "fake-model", **body})
            run_id = answered.headers["x-sandbox-run"]
            found = await run_record(http, run_id)
            foreign = await run_record(http, run_id, authorization="Bearer sk-other")
        if restarted:
            async with (
                serve_with_keys(backend, state_dir=tmp_path) as url,
                http_client(url) as http,
            ):
                found = await run_record(http, run_id)
    run = found.json()
    assert (found.status_code, foreign.status_code) == (200, 404)
    assert (run["id"], run["object"], run["status"]) == (run_id, "run", "completed")
    assert (run["stop_reason"], run["error"]) == ("answered", None)
    assert run["container_id"] == answered.headers["x-sandbox-container"]
    assert (run["usage"]["total_tokens"], run["usage"]["sandbox"]["tool_calls"]) == (30, 1)
    assert run["completion"] is None
    assert "It is 42." not in found.text


async def test_each_choice_has_a_run_summary(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER] * 3) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        choices = (await post_chat(http, n=3)).json()["choices"]
        runs = [choice["sandbox"] for choice in choices]
        found = [(await run_record(http, run["run_id"])).json() for run in runs]
    assert [run["id"] for run in found] == [run["run_id"] for run in runs]
    assert [run["container_id"] for run in found] == [run["container_id"] for run in runs]
    assert [run["usage"]["total_tokens"] for run in found] == [45, 15, 15]


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [([], "failed", "backend_error"), ([Held(ANSWER, asyncio.Event())], "cancelled", None)],
)
async def test_failed_or_cancelled_run_has_a_summary(
    script: list[Item], status: str, code: str | None, tmp_path: Path
) -> None:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        body = {"model": "fake-model", "messages": MESSAGES, "stream": True}
        with anyio.fail_after(20):
            async with http.stream("POST", "/v1/chat/completions", json=body) as answered:
                run_id = answered.headers["x-sandbox-run"]
                if script:
                    assert (await run_record(http, run_id)).json()["status"] == "running"
                else:
                    await answered.aread()
            while (run := (await run_record(http, run_id)).json())["status"] == "running":
                await anyio.lowlevel.checkpoint()
    assert (run["status"], run["completion"], run["usage"]) == (status, None, None)
    assert (run["error"] is None) == (code is None)


@pytest.mark.parametrize("later_s", [SUMMARY_KEEP_S - 1, SUMMARY_KEEP_S])
async def test_run_summary_expires_after_a_day(later_s: int, tmp_path: Path) -> None:
    clock = ManualClock()

    def files() -> FileStore:
        return FileStore(open_store(tmp_path, now=clock.time), limits=ArtifactLimits())

    async with scripted_backend([ANSWER]) as backend:
        async with (
            running_proxy(backend, "memory", tmp_path, files=files()) as url,
            http_client(url) as http,
        ):
            run_id = (await post_chat(http)).headers["x-sandbox-run"]
        clock.advance(later_s)
        async with (
            running_proxy(backend, "memory", tmp_path, files=files()) as url,
            http_client(url) as http,
        ):
            found = await run_record(http, run_id)
    assert found.status_code == (200 if later_s < SUMMARY_KEEP_S else 404)
