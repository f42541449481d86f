"""A run that waits for its client's tools, whoever answers it how often, and whatever happens
between two requests."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat import PATH, client
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve

ASKED = {"role": "user", "content": "Begin."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PARK = tool_reply(call("execute_bash", command="echo kept > file"), call("weather", city="Bonn"))
WORDS = ("Rain.", "Sun.")


@asynccontextmanager
async def served(
    backend: ScriptedBackend, state_dir: Path, sandboxes: MemorySandboxes
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server; when it ends, so has every sandbox."""
    model = model_client(backend)
    with anyio.fail_after(20):
        async with serve(make_services(model, sandboxes, state_dir)) as url, client(url) as http:
            yield http
        await model.aclose()
    assert sandboxes.opened == sandboxes.closed


async def said(http: httpx.AsyncClient, *messages: Mapping[str, Any]) -> dict[str, Any]:
    """The message that answers these."""
    sent = {"model": "fake-model", "messages": messages, "tools": TOOLS}
    response = await http.post(PATH, json=sent)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def result(asked: Mapping[str, Any], content: str) -> dict[str, Any]:
    """The client's answer to a message's only call."""
    (called,) = asked["tool_calls"]
    return {"role": "tool", "tool_call_id": called["id"], "content": content}


def word(body: Mapping[str, Any]) -> str:
    """What the client last answered with."""
    given = [str(each.get("content")) for each in body["messages"] if each["role"] == "tool"]
    return next((each for each in reversed(given) if not each.startswith("Exit code")), "")


def work(word: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=f"echo {word} >> file; cat file"))


@pytest.mark.parametrize("first", WORDS)
async def test_two_answers_at_once_have_a_copy_each_whichever_ends_first(
    first: str, tmp_path: Path
) -> None:
    may_end = {word: asyncio.Event() for word in (*WORDS, "Snow.")}
    may_end["Snow."].set()

    def play(body: dict[str, Any]) -> Item:
        answered = word(body)
        if not answered:
            return PARK
        if body["messages"][-1]["content"] == answered:
            return work(answered)
        return Held(text_reply(f"It is {answered}"), may_end[answered])

    answers: dict[str, str] = {}
    async with (
        scripted_backend(play) as backend,
        served(backend, tmp_path, MemorySandboxes()) as http,
    ):
        asked = await said(http, ASKED)
        ended = {word: asyncio.Event() for word in WORDS}

        async def go_on(word: str) -> None:
            answers[word] = (await said(http, ASKED, asked, result(asked, word)))["content"]
            ended[word].set()

        async with anyio.create_task_group() as group:
            for each in WORDS:
                group.start_soon(go_on, each)
            await backend.arrived(5)  # both are at their last model call
            for each in sorted(WORDS, key=lambda each: each != first):
                may_end[each].set()
                await ended[each].wait()
        answers["Snow."] = (await said(http, ASKED, asked, result(asked, "Snow.")))["content"]
        told = [request.body["messages"][-1]["content"] for request in backend.requests]
    assert answers == {word: f"It is {word}" for word in (*WORDS, "Snow.")}
    shown = sorted(each.partition("[stdout]\n")[2] for each in told if "[stdout]" in each)
    assert shown == ["kept\nRain.", "kept\nSnow.", "kept\nSun."]
    assert len(backend.requests) == 7


@pytest.mark.parametrize("first", ["runs", "sits"])
async def test_an_answer_that_comes_while_the_first_is_at_work_hears_nothing_of_it(
    first: str, tmp_path: Path
) -> None:
    """The first is at its command's end, or has not begun; the second comes, and ends before."""
    release = asyncio.Event()

    def play(body: dict[str, Any]) -> Item:
        answered, last = word(body), body["messages"][-1]["content"]
        if not answered:
            return PARK
        item = work(answered) if last == answered else text_reply(f"It is {answered}")
        is_held = answered == "Rain." and (last == answered) == (first == "sits")
        return Held(item, release) if is_held else item

    answers: list[str] = []
    async with (
        scripted_backend(play) as backend,
        served(backend, tmp_path, MemorySandboxes()) as http,
        anyio.create_task_group() as group,
    ):
        asked = await said(http, ASKED)

        async def go_on() -> None:
            answers.append((await said(http, result(asked, "Rain.")))["content"])

        group.start_soon(go_on)
        await backend.arrived(3 if first == "runs" else 2)
        answers.append((await said(http, result(asked, "Sun.")))["content"])
        release.set()
    assert answers == ["It is Sun.", "It is Rain."]
    told = [request.body["messages"][-1]["content"] for request in backend.requests]
    shown = sorted(each.partition("[stdout]\n")[2] for each in told if "[stdout]" in each)
    assert shown == ["kept\nRain.", "kept\nSun."]


@pytest.mark.parametrize("restarts", list(product([False, True], repeat=3)))
async def test_a_restart_between_any_two_requests_loses_nothing(
    restarts: tuple[bool, ...], tmp_path: Path
) -> None:
    park = tool_reply(call("execute_bash", command="echo 1 >> file"), call("weather"))
    look = tool_reply(call("execute_bash", command="cat file"))
    script = [park, park, park, look, text_reply("Done.")]
    async with scripted_backend(script) as backend:
        messages: list[Mapping[str, Any]] = [ASKED]
        sandboxes = MemorySandboxes()
        async with AsyncExitStack() as server:
            http = await server.enter_async_context(served(backend, tmp_path, sandboxes))
            for number, restart in enumerate(restarts):
                message = await said(http, *messages)
                messages += [message, result(message, f"{number}")]
                if restart:
                    await server.aclose()
                    http = await server.enter_async_context(served(backend, tmp_path, sandboxes))
            assert (await said(http, *messages))["content"] == "Done."
        told = [request.body["messages"] for request in backend.requests]
    assert "[stdout]\n1\n1\n1" in told[-1][-1]["content"]
    for before, after in pairwise(told):
        assert after[: len(before)] == before
    assert len(backend.requests) == 5
    assert sandboxes.opened == 1 + sum(restarts)
