"""Requests that come again: one run, whose answer each of them gets."""

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
from tests.clients.chat import (
    ASKED,
    FIRST,
    PATH,
    SECOND,
    Asking,
    answer,
    ask,
    client,
    delta,
    leave_after,
    reasoning,
)
from tests.clients.errors import ASKED as MESSAGES
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import ATTEMPTS, EachKey, make_services, model_client, running_proxy, serve
from tests.fakes.waiting import until

PATIENT = partial(RunManager, grace_s=3600)
"""However slow the machine is, the client comes back in time."""
KEY = {"Idempotency-Key": "order-1"}


# OpenAI's SDKs


async def test_an_sdk_that_gives_up_twice_and_asks_again_has_one_run(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def let_the_last_one_wait(request: httpx.Request) -> None:
        if request.headers["x-stainless-retry-count"] == "2":
            request.extensions["timeout"] = httpx.Timeout(None).as_dict()
            release.set()

    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=PATIENT) as url,
        httpx.AsyncClient(event_hooks={"request": [let_the_last_one_wait]}) as http,
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
                extra_headers={"x-stainless-read-timeout": "600"},  # what it says, and does not do
            )
    assert completion.choices[0].message.content == "42"
    assert len(backend.requests) == 1


async def test_a_run_that_ended_meanwhile_is_not_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=PATIENT) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            await leave_after(backend, 1, url, FIRST)
            release.set()
            await until(lambda: "ended: answered" in caplog.text)
            assert answer(await ask(http, SECOND)) == "42"
    assert len(backend.requests) == 1


async def test_a_retry_joins_a_run_whose_client_is_not_known_to_have_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                asking = Asking(http, group)
                asking.begin(FIRST)
                await backend.arrived(1)
                asking.begin(SECOND)
                await until(lambda: "a client has subscribed again" in caplog.text)
                release.set()
    first, second = asking.responses[0], asking.responses[1]
    assert first.headers["x-sandbox-run"] == second.headers["x-sandbox-run"]
    assert first.json() == second.json()
    assert len(backend.requests) == 1


async def test_equal_requests_are_two_runs(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), Held(text_reply("two"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                asking = Asking(http, group)
                asking.begin(FIRST)
                asking.begin(FIRST)
                await backend.arrived(2)
                release.set()
    assert {answer(found) for found in asking.responses.values()} == {"one", "two"}


async def test_each_of_two_equal_requests_gets_its_own_run_back(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("one"), release), Held(text_reply("two"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=PATIENT) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            await leave_after(backend, 1, url, FIRST)
            await leave_after(backend, 2, url, FIRST)
            async with anyio.create_task_group() as group:
                asking = Asking(http, group)
                asking.begin(SECOND)
                asking.begin(SECOND)
                release.set()
    assert {answer(found) for found in asking.responses.values()} == {"one", "two"}
    assert len(backend.requests) == 2


async def test_a_retry_of_what_failed_does_not_join_its_twin(tmp_path: Path) -> None:
    release = asyncio.Event()
    failing = [Refusal(500)] * ATTEMPTS
    script = [Held(text_reply("one"), release), *failing, text_reply("two")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                asking = Asking(http, group)
                asking.begin(FIRST)
                await backend.arrived(1)
                assert (await ask(http, FIRST)).status_code == 500
                assert answer(await ask(http, SECOND)) == "two"
                release.set()
    assert answer(asking.responses[0]) == "one"


async def test_an_answer_that_was_heard_is_not_given_to_somebody_else(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("one"), text_reply("two")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        assert answer(await ask(http, FIRST)) == "one"
        assert answer(await ask(http, SECOND)) == "two"
    assert len(backend.requests) == 2


@pytest.mark.parametrize("headers", [SECOND, KEY])
async def test_another_key_s_run_is_nobody_else_s(headers: dict[str, str], tmp_path: Path) -> None:
    release = asyncio.Event()
    mine = {**FIRST, **headers, "Authorization": "Bearer sk-mine"}
    yours = {**headers, "Authorization": "Bearer sk-yours"}
    async with (
        scripted_backend([Held(text_reply("mine"), release), text_reply("yours")]) as backend,
        running_proxy(backend, "memory", tmp_path, make_runs=PATIENT, keyring=EachKey()) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            await leave_after(backend, 1, url, mine)
            assert answer(await ask(http, yours)) == "yours"
            release.set()
    assert len(backend.requests) == 2


# Idempotency-Key


@pytest.mark.parametrize("streams", [(False, True), (True, False), (True, True), (False, False)])
async def test_the_same_key_joins_the_run_streamed_or_not(
    streams: tuple[bool, bool], tmp_path: Path
) -> None:
    release = asyncio.Event()
    step = tool_reply(call("execute_bash", command="echo 42"))
    async with (
        scripted_backend([step, Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                asking = Asking(http, group)
                asking.begin(KEY, stream=streams[0])
                await backend.arrived(2)
                body = {**ASKED, "stream": True}
                async with http.stream("POST", PATH, json=body, headers=KEY) as joined:
                    # Its head is here: it hears the run.
                    asking.begin(KEY, stream=streams[1])
                    release.set()
                    await joined.aread()
    found = [joined, asking.responses[0], asking.responses[1]]
    assert {answer(each) for each in found} == {"42"}
    assert {reasoning(each).partition("[exit 0")[0] for each in found} == {
        "````console\n$ echo 42\n42\n"
    }
    assert len({each.headers["x-sandbox-run"] for each in found}) == 1
    assert len({(each.headers["x-sandbox-container"]) for each in found}) == 1
    assert len(backend.requests) == 2


async def test_many_at_once_with_one_key_are_one_run(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42")]) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        async with serve(make_services(model, sandboxes, tmp_path)) as url, client(url) as http:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    asking = Asking(http, group)
                    for _ in range(20):
                        asking.begin(KEY)
        await model.aclose()
    assert len({found.json()["id"] for found in asking.responses.values()}) == 1
    assert len(asking.responses) == 20
    assert (len(backend.requests), sandboxes.opened) == (1, sandboxes.closed)


async def test_a_result_is_given_again_for_a_while(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        first, second = await ask(http, KEY), await ask(http, KEY)
        streamed = await ask(http, KEY, stream=True)
    assert first.json() == second.json()
    assert answer(first) == answer(streamed) == "42"
    assert len(backend.requests) == 1


async def test_what_failed_is_begun_anew(tmp_path: Path) -> None:
    async with (
        scripted_backend([*[Refusal(500)] * ATTEMPTS, text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        assert (await ask(http, KEY)).status_code == 500
        assert answer(await ask(http, KEY)) == "42"


async def test_a_key_stands_for_one_request(tmp_path: Path) -> None:
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
    """The arguments of a streamed call, piece by piece."""
    async with http.stream("POST", PATH, json={**ASKED, **body}, headers=KEY) as response:
        async for line in response.aiter_lines():
            found = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            for made in delta(found).get("tool_calls", ()) if found else ():
                if piece := made["function"]["arguments"]:
                    yield piece


async def test_who_joins_in_the_midst_of_a_call_gets_all_of_it(tmp_path: Path) -> None:
    written = json.dumps({"text": "a line of a file, " * 5})
    reply = tool_reply({"name": "write_file", "arguments": written})
    function = {"name": "write_file", "parameters": {"type": "object"}}
    body = {"stream": True, "tools": [{"type": "function", "function": function}]}
    release = asyncio.Event()
    async with (
        scripted_backend([Held(reply, release, after_pieces=6)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            early, late = pieces_of_call(http, **body), pieces_of_call(http, **body)
            heard = [await anext(early) for _ in range(4)]
            joined = [await anext(late)]
            release.set()
            heard += [piece async for piece in early]
            joined += [piece async for piece in late]
    assert joined[0] == "".join(heard[:4])
    assert "".join(heard) == "".join(joined) == written
    assert len(backend.requests) == 1
