"""Suspended runs that are resumed several times, concurrently, or after a restart."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from sandbox_runtime.sandbox import Sink
from tests.clients.chat_http import PATH, http_client
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.memory_sandbox import MemorySandbox, MemorySandboxes
from tests.fakes.server import make_services, model_client, serve

USER_MESSAGE = {"role": "user", "content": "Begin."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SUSPEND = tool_reply(call("execute_bash", command="echo kept > file"), call("weather", city="Bonn"))
DONE = text_reply("Done.")
WORDS = ("Rain.", "Sun.")


@asynccontextmanager
async def resume_client(
    backend: ScriptedBackend, state_dir: Path, sandboxes: MemorySandboxes, **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve and yield a client; all sandboxes must be closed when the server stops. `changes` are
    fields of Services."""
    model = model_client(backend)
    with anyio.fail_after(20):
        async with (
            serve(make_services(model, sandboxes, state_dir, **changes)) as url,
            http_client(url) as http,
        ):
            yield http
        await model.aclose()
    assert sandboxes.opened == sandboxes.closed


async def next_message(http: httpx.AsyncClient, *messages: Mapping[str, Any]) -> dict[str, Any]:
    """Send the messages and return the message that answers them."""
    sent = {"model": "fake-model", "messages": messages, "tools": TOOLS}
    response = await http.post(PATH, json=sent)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def tool_result(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the client's result for the only call of a message."""
    (called,) = message["tool_calls"]
    return {"role": "tool", "tool_call_id": called["id"], "content": content}


def last_client_result(body: Mapping[str, Any]) -> str:
    """Return the last result that the client sent."""
    given = [str(each.get("content")) for each in body["messages"] if each["role"] == "tool"]
    return next((each for each in reversed(given) if not each.startswith("Exit code")), "")


def append_and_show(word: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=f"echo {word} >> file; cat file"))


@pytest.mark.parametrize("first", WORDS)
async def test_concurrent_resumes_have_separate_files(first: str, tmp_path: Path) -> None:
    may_end = {word: asyncio.Event() for word in (*WORDS, "Snow.")}
    may_end["Snow."].set()

    def script(body: dict[str, Any]) -> Item:
        client_result = last_client_result(body)
        if not client_result:
            return SUSPEND
        if body["messages"][-1]["content"] == client_result:
            return append_and_show(client_result)
        return Held(text_reply(f"It is {client_result}"), may_end[client_result])

    answers: dict[str, str] = {}
    async with (
        scripted_backend(script) as backend,
        resume_client(backend, tmp_path, MemorySandboxes()) as http,
    ):
        message = await next_message(http, USER_MESSAGE)
        ended = {word: asyncio.Event() for word in WORDS}

        async def go_on(word: str) -> None:
            answers[word] = (
                await next_message(http, USER_MESSAGE, message, tool_result(message, word))
            )["content"]
            ended[word].set()

        async with anyio.create_task_group() as group:
            for each in WORDS:
                group.start_soon(go_on, each)
            await backend.arrived(5)  # both runs are at their last model call
            for each in sorted(WORDS, key=lambda each: each != first):
                may_end[each].set()
                await ended[each].wait()
        answers["Snow."] = (
            await next_message(http, USER_MESSAGE, message, tool_result(message, "Snow."))
        )["content"]
        last_messages = [request.body["messages"][-1]["content"] for request in backend.requests]
    assert answers == {word: f"It is {word}" for word in (*WORDS, "Snow.")}
    shown = sorted(each.partition("[stdout]\n")[2] for each in last_messages if "[stdout]" in each)
    assert shown == ["kept\nRain.", "kept\nSnow.", "kept\nSun."]
    assert len(backend.requests) == 7


@pytest.mark.parametrize("held", ["after its command", "before its command"])
async def test_resume_does_not_see_changes_of_a_concurrent_resume(
    held: str, tmp_path: Path
) -> None:
    """The first resume waits before or after its command while the second one runs to its end."""
    release = asyncio.Event()

    def script(body: dict[str, Any]) -> Item:
        client_result, last = last_client_result(body), body["messages"][-1]["content"]
        if not client_result:
            return SUSPEND
        item = (
            append_and_show(client_result)
            if last == client_result
            else text_reply(f"It is {client_result}")
        )
        is_held = client_result == "Rain." and (last == client_result) == (
            held == "before its command"
        )
        return Held(item, release) if is_held else item

    answers: list[str] = []
    async with (
        scripted_backend(script) as backend,
        resume_client(backend, tmp_path, MemorySandboxes()) as http,
        anyio.create_task_group() as group,
    ):
        message = await next_message(http, USER_MESSAGE)

        async def go_on() -> None:
            answers.append((await next_message(http, tool_result(message, "Rain.")))["content"])

        group.start_soon(go_on)
        await backend.arrived(3 if held == "after its command" else 2)
        answers.append((await next_message(http, tool_result(message, "Sun.")))["content"])
        release.set()
    assert answers == ["It is Sun.", "It is Rain."]
    last_messages = [request.body["messages"][-1]["content"] for request in backend.requests]
    shown = sorted(each.partition("[stdout]\n")[2] for each in last_messages if "[stdout]" in each)
    assert shown == ["kept\nRain.", "kept\nSun."]


@pytest.mark.parametrize("restarts", list(product([False, True], repeat=3)))
async def test_suspended_run_survives_a_restart_between_any_two_requests(
    restarts: tuple[bool, ...], tmp_path: Path
) -> None:
    suspend = tool_reply(call("execute_bash", command="echo 1 >> file"), call("weather"))
    look = tool_reply(call("execute_bash", command="cat file"))
    script = [suspend, suspend, suspend, look, text_reply("Done.")]
    async with scripted_backend(script) as backend:
        messages: list[Mapping[str, Any]] = [USER_MESSAGE]
        sandboxes = MemorySandboxes()
        async with AsyncExitStack() as server:
            http = await server.enter_async_context(resume_client(backend, tmp_path, sandboxes))
            for number, restart in enumerate(restarts):
                message = await next_message(http, *messages)
                messages += [message, tool_result(message, f"{number}")]
                if restart:
                    await server.aclose()
                    http = await server.enter_async_context(
                        resume_client(backend, tmp_path, sandboxes)
                    )
            assert (await next_message(http, *messages))["content"] == "Done."
        histories = [request.body["messages"] for request in backend.requests]
    assert "[stdout]\n1\n1\n1" in histories[-1][-1]["content"]
    for before, after in pairwise(histories):
        assert after[: len(before)] == before
    assert len(backend.requests) == 5
    assert sandboxes.opened == 1 + sum(restarts)


class HeldSandbox(MemorySandbox):
    """A sandbox whose snapshot waits for an event."""

    def __init__(self, may_be_saved: asyncio.Event) -> None:
        super().__init__()
        self._may_be_saved = may_be_saved

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        await self._may_be_saved.wait()
        return await super().snapshot(sink, max_bytes=max_bytes)


@pytest.mark.parametrize("resumes", ["suspended run", "session"])
async def test_produced_file_that_is_still_being_saved_is_not_an_input_file_of_the_next_run(
    resumes: str, tmp_path: Path
) -> None:
    write = call("execute_bash", command="echo one > output/a.csv")
    look = "cat output/a.csv; test -e documents/.given || echo nothing was uploaded"
    is_suspended = resumes == "suspended run"
    first = [tool_reply(write, call("weather"))] if is_suspended else [tool_reply(write), DONE]
    may_be_saved = asyncio.Event()
    sandboxes = MemorySandboxes(make_sandbox=partial(HeldSandbox, may_be_saved))
    body = {"model": "fake-model", "messages": [USER_MESSAGE]}
    body |= {"tools": TOOLS} if is_suspended else {"sandbox": {"session": "mine"}}
    async with (
        scripted_backend([*first, tool_reply(call("execute_bash", command=look)), DONE]) as backend,
        resume_client(backend, tmp_path, sandboxes, status_wait_s=0.0) as http,
    ):
        message = (await http.post(PATH, json=body)).json()["choices"][0]["message"]
        reply = tool_result(message, "Rain.") if is_suspended else USER_MESSAGE
        body |= {"messages": [USER_MESSAGE, message, reply], "stream": True}
        async with http.stream("POST", PATH, json=body) as response:
            # The response has begun, so the run is prepared.
            may_be_saved.set()
            await response.aread()
        seen = backend.requests[-1].body["messages"][-1]["content"]
    assert response.status_code == 200
    assert seen.partition("[stdout]\n")[2] == "one\nnothing was uploaded"
    assert sandboxes.opened == 1
