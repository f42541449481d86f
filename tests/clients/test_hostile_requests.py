"""Requests that no client sends by mistake: each costs its sender an error, and nobody else
anything.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.agent.agent import Agent
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.api.dependencies import owner_of
from proxy.models.scripted import text_reply
from proxy.runs.manager import RunManager
from proxy.store.runs import RunRepository
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.server import running_proxy
from tests.proxy.agent.runs import USER

CHAT = "/v1/chat/completions"
HALF = "\ud800"
FUNCTION = {"name": "f", "parameters": {}}
CALL_OF_NOTHING = {"role": "assistant", "function_call": {"name": None}}


def body_of(**fields: Any) -> bytes:
    # ASCII JSON can carry a lone surrogate.
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (body_of(sandbox={"file_ids": [HALF]}), {}),
        (
            body_of(
                messages=[
                    {"role": "user", "content": [{"type": "file", "file": {"file_id": HALF}}]}
                ]
            ),
            {},
        ),
        (body_of(tools=[{"type": "function", "function": None}]), {}),
        (body_of(top_k=1).replace(b": 1}", b": 1e999}"), {}),
        (body_of(stream_options=[1]), {"Idempotency-Key": "1"}),
        (body_of(function_call={"name": None}, functions=[FUNCTION]), {}),
        (body_of(messages=[USER, CALL_OF_NOTHING]), {}),
    ],
)
async def test_invalid_field_is_a_bad_request(
    body: bytes, headers: dict[str, str], tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        answer = await client.post(url + CHAT, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"messages": [USER, {"role": "function", "content": "x"}]}, {}),
        ({}, {"x-stainless-retry-count": "1" * 5000}),
        ({}, {"x-stainless-timeout": "1e-9"}),
    ],
)
async def test_unusual_but_harmless_request_is_answered(
    fields: dict[str, Any], headers: dict[str, str], tmp_path: Path
) -> None:
    functions = [FUNCTION] if fields else None
    async with (
        scripted_backend([text_reply("Well.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        body = body_of(**fields, functions=functions, stream="timeout" in str(headers))
        answer = await client.post(url + CHAT, content=body, headers=headers)
    assert answer.status_code == 200
    assert "Well." in answer.text
    assert answer.text.count("keep-alive") < 10


@pytest.mark.parametrize("query", ["limit=--5", "limit=%2d%2d5"])
async def test_malformed_page_limit_is_refused(query: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"{url}/v1/files?{query}")).status_code == 400


async def test_body_over_the_limit_is_refused_with_413(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        answer = await client.post(f"{url}/v1/containers", content=endless())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_many_files_of_the_same_name_are_accepted(tmp_path: Path) -> None:
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": "eA=="}}
    message = {"role": "user", "content": [part] * 5000}
    async with (
        scripted_backend([text_reply("Well.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        with anyio.fail_after(20):
            answer = await client.post(url + CHAT, content=body_of(messages=[message]))
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["data:text/html,x", "data:日本/x,y"])
async def test_file_name_does_not_set_the_content_type(name: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient() as client,
    ):
        sent = await client.post(
            f"{url}/v1/files", data={"purpose": "user_data"}, files={"file": (name, b"x")}
        )
        content = await client.get(f"{url}/v1/files/{sent.json()['id']}/content")
    assert content.status_code == 200
    assert content.headers["content-type"].partition(";")[0] == "application/octet-stream"


async def test_invalid_request_that_joins_a_run_releases_its_subscription(tmp_path: Path) -> None:
    release = asyncio.Event()
    key = {"Idempotency-Key": "1"}
    made: list[RunManager] = []

    def make_runs(
        agent: Agent, suspended_runs: SuspendedRunStore, repository: RunRepository
    ) -> RunManager:
        made.append(RunManager(agent, suspended_runs, repository, grace_s=0))
        return made[0]

    async with (
        scripted_backend([Held(text_reply("Well."), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=make_runs) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        asked, wrong = body_of(stream=True), body_of(stream=True, stream_options=[1])
        with anyio.fail_after(20):
            async with client.stream("POST", url + CHAT, content=asked, headers=key) as response:
                answer = await client.post(url + CHAT, content=wrong, headers=key)
                run = made[0].get(owner_of(""), response.headers["x-sandbox-run"])
                assert run
                assert (answer.status_code, run.subscriber_count) == (400, 1)
                release.set()
                await response.aread()
