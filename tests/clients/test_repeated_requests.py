"""Retried requests and idempotency keys: one run, whose answer each request gets."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import RunManager
from tests.clients.chat_http import (
    BODY,
    FIRST,
    PATH,
    SECOND,
    ConcurrentRequests,
    answer_text,
    delta,
    disconnect_after,
    http_client,
    post_chat,
    reasoning_text,
)
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import ATTEMPTS, EachKey, make_services, model_client, running_proxy, serve
from tests.fakes.waiting import until

LONG_GRACE = partial(RunManager, grace_s=3600)
"""A grace period that outlasts any test."""
KEY = {"Idempotency-Key": "order-1"}


# OpenAI's SDKs


async def test_sdk_retries_after_timeouts_join_one_run(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def remove_the_last_timeout(request: httpx.Request) -> None:
        if request.headers["x-stainless-retry-count"] == "2":
            request.extensions["timeout"] = httpx.Timeout(None).as_dict()
            release.set()

    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=LONG_GRACE) as url,
        httpx.AsyncClient(event_hooks={"request": [remove_the_last_timeout]}) as http,
    ):
        sdk = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            http_client=http,
            timeout=0.3,
            max_retries=2,
        )
        with anyio.fail_after(30):
            completion = await sdk.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                extra_headers={
                    "x-stainless-read-timeout": "600"
                },  # announced to the server, but not applied by the client
            )
    assert completion.choices[0].message.content == "42"
    assert len(backend.requests) == 1


async def test_sdk_retry_gets_the_result_of_a_run_that_ended_before_the_retry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=LONG_GRACE) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            await disconnect_after(backend, 1, url, FIRST)
            release.set()
            await until(lambda: "ended: answered" in caplog.text)
            assert answer_text(await post_chat(http, SECOND)) == "42"
    assert len(backend.requests) == 1


async def test_sdk_retry_joins_a_run_before_the_disconnect_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(FIRST)
                await backend.arrived(1)
                requests.begin(SECOND)
                await until(lambda: "a client has subscribed again" in caplog.text)
                release.set()
    first, second = requests.responses[0], requests.responses[1]
    assert first.headers["x-sandbox-run"] == second.headers["x-sandbox-run"]
    assert first.json() == second.json()
    assert len(backend.requests) == 1


async def test_equal_requests_without_an_idempotency_key_start_two_runs(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), Held(text_reply("two"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(FIRST)
                requests.begin(FIRST)
                await backend.arrived(2)
                release.set()
    assert {answer_text(found) for found in requests.responses.values()} == {"one", "two"}


async def test_retries_of_equal_requests_join_different_runs(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), Held(text_reply("two"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=LONG_GRACE) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            await disconnect_after(backend, 1, url, FIRST)
            await disconnect_after(backend, 2, url, FIRST)
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(SECOND)
                requests.begin(SECOND)
                release.set()
    assert {answer_text(found) for found in requests.responses.values()} == {"one", "two"}
    assert len(backend.requests) == 2


async def test_retry_of_a_failed_run_does_not_join_an_equal_request(tmp_path: Path) -> None:
    release = asyncio.Event()
    failing = [Refusal(500)] * ATTEMPTS
    script = [Held(text_reply("one"), release), *failing, text_reply("two")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(FIRST)
                await backend.arrived(1)
                assert (await post_chat(http, FIRST)).status_code == 500
                assert answer_text(await post_chat(http, SECOND)) == "two"
                release.set()
    assert answer_text(requests.responses[0]) == "one"


async def test_delivered_answer_is_not_given_to_a_retry(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("one"), text_reply("two")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        assert answer_text(await post_chat(http, FIRST)) == "one"
        assert answer_text(await post_chat(http, SECOND)) == "two"
    assert len(backend.requests) == 2


@pytest.mark.parametrize("headers", [SECOND, KEY])
async def test_run_of_another_key_is_not_joined(headers: dict[str, str], tmp_path: Path) -> None:
    release = asyncio.Event()
    mine = {**FIRST, **headers, "Authorization": "Bearer sk-mine"}
    yours = {**headers, "Authorization": "Bearer sk-yours"}
    async with (
        scripted_backend([Held(text_reply("mine"), release), text_reply("yours")]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=LONG_GRACE, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            await disconnect_after(backend, 1, url, mine)
            assert answer_text(await post_chat(http, yours)) == "yours"
            release.set()
    assert len(backend.requests) == 2


# Idempotency-Key


@pytest.mark.parametrize("streams", [(False, True), (True, False), (True, True), (False, False)])
async def test_same_idempotency_key_joins_the_run_of_a_streamed_or_unstreamed_request(
    streams: tuple[bool, bool], tmp_path: Path
) -> None:
    release = asyncio.Event()
    step = tool_reply(call("execute_bash", command="echo 42"))
    async with (
        scripted_backend([step, Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                requests = ConcurrentRequests(http, group)
                requests.begin(KEY, stream=streams[0])
                await backend.arrived(2)
                body = {**BODY, "stream": True}
                async with http.stream("POST", PATH, json=body, headers=KEY) as joined:
                    # The response has started: the client is subscribed.
                    requests.begin(KEY, stream=streams[1])
                    release.set()
                    await joined.aread()
    found = [joined, requests.responses[0], requests.responses[1]]
    assert {answer_text(each) for each in found} == {"42"}
    assert {reasoning_text(each).partition("[exit 0")[0] for each in found} == {
        "````console\n$ echo 42\n42\n"
    }
    assert len({each.headers["x-sandbox-run"] for each in found}) == 1
    assert len({(each.headers["x-sandbox-container"]) for each in found}) == 1
    assert len(backend.requests) == 2


async def test_concurrent_requests_with_one_idempotency_key_start_one_run(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        async with (
            serve(make_services(model, sandboxes, tmp_path)) as url,
            http_client(url) as http,
        ):
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    requests = ConcurrentRequests(http, group)
                    for _ in range(20):
                        requests.begin(KEY)
        await model.aclose()
    assert len({found.json()["id"] for found in requests.responses.values()}) == 1
    assert len(requests.responses) == 20
    assert (len(backend.requests), sandboxes.opened) == (1, sandboxes.closed)


async def test_repeated_idempotency_key_returns_the_finished_result(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        first, second = await post_chat(http, KEY), await post_chat(http, KEY)
        streamed = await post_chat(http, KEY, stream=True)
    assert first.json() == second.json()
    assert answer_text(first) == answer_text(streamed) == "42"
    assert len(backend.requests) == 1


async def test_idempotency_key_of_a_failed_run_starts_a_new_run(tmp_path: Path) -> None:
    async with (
        scripted_backend([*[Refusal(500)] * ATTEMPTS, text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        assert (await post_chat(http, KEY)).status_code == 500
        assert answer_text(await post_chat(http, KEY)) == "42"


async def test_idempotency_key_of_another_request_is_refused(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
    ):
        for temperature in (0.1, 0.2):
            asked = partial(
                sdk.chat.completions.create,
                model="fake-model",
                messages=MESSAGES,
                temperature=temperature,
                extra_headers=KEY,
            )
            if temperature == 0.1:
                await asked()
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await asked()
    assert (caught.value.param, caught.value.code) == ("Idempotency-Key", "idempotency_key_reused")
    assert len(backend.requests) == 1


# Calls of the client's tools, as the model writes them


async def pieces_of_call(http: httpx.AsyncClient, **body: Any) -> AsyncIterator[str]:
    """Yield the argument pieces of a streamed call."""
    async with http.stream("POST", PATH, json={**BODY, **body}, headers=KEY) as response:
        async for line in response.aiter_lines():
            found = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            for made in delta(found).get("tool_calls", ()) if found else ():
                if piece := made["function"]["arguments"]:
                    yield piece


async def test_late_subscriber_gets_the_complete_client_tool_call(tmp_path: Path) -> None:
    written = json.dumps({"text": "a line of a file, " * 5})
    reply = tool_reply({"name": "write_file", "arguments": written})
    function = {"name": "write_file", "parameters": {"type": "object"}}
    body = {"stream": True, "tools": [{"type": "function", "function": function}]}
    release = asyncio.Event()
    async with (
        scripted_backend([Held(reply, release, after_pieces=6)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            early, late = pieces_of_call(http, **body), pieces_of_call(http, **body)
            first_pieces = [await anext(early) for _ in range(4)]
            joined = [await anext(late)]
            release.set()
            first_pieces += [piece async for piece in early]
            joined += [piece async for piece in late]
    assert joined[0] == "".join(first_pieces[:4])
    assert "".join(first_pieces) == "".join(joined) == written
    assert len(backend.requests) == 1
