"""Requests with `n` above one, sent with the openai SDK."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES, openai_client, request_error
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import (
    AT_ONCE,
    KINDS,
    Kind,
    make_services,
    model_client,
    running_proxy,
    serve,
)

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
MAKE = {
    **tool_reply(call("execute_bash", command="echo made > output/a.txt")),
    "usage": USAGE,
}


def turn_count(seen: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in seen["messages"])


def submit(answer: str) -> dict[str, Any]:
    return {**tool_reply(call("submit", answer=answer)), "usage": USAGE}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_choice_has_an_answer_and_files_and_a_container_of_its_own(
    kind: Kind, tmp_path: Path
) -> None:
    answers = iter(["one", "two", "three"])

    def script(seen: dict[str, Any]) -> Item:
        return submit(next(answers)) if turn_count(seen) else MAKE

    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, kind, tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(60):
            completion = await client.chat.completions.create(
                model="fake-model", messages=MESSAGES, n=3
            )
    choices = completion.choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert {choice.message.content for choice in choices} == {"one", "two", "three"}
    runs = [(choice.model_extra or {})["sandbox"] for choice in choices]
    assert runs[0] == (completion.model_extra or {})["sandbox"]
    assert len({run["files"][0]["url"] for run in runs}) == 3
    assert len({run["container_id"] for run in runs}) == 3
    assert all("$ echo made" in (c.message.model_extra or {})["reasoning"] for c in choices)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.total_tokens) == (60, 90)


async def test_choices_are_streamed_concurrently_with_their_index(tmp_path: Path) -> None:
    """The first choice is held back until the second one has sent text."""
    second_started = asyncio.Event()
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    order: list[int] = []
    held = iter([True, False])

    def script(seen: dict[str, Any]) -> Item:
        reply = text_reply("The answer is here. " * 60)
        return Held(reply, second_started) if next(held) else reply

    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            stream = await client.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for piece in stream:
                for choice in piece.choices:
                    if choice.delta.content:
                        order.append(choice.index)
                        second_started.set()
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                    if choice.finish_reason:
                        ends[choice.index] = choice.finish_reason
    assert texts == {0: "The answer is here. " * 60, 1: "The answer is here. " * 60}
    assert ends == {0: "stop", 1: "stop"}
    assert set(order) == {0, 1}
    assert piece.usage is not None


async def test_failed_choice_fails_the_request_and_closes_every_sandbox(tmp_path: Path) -> None:
    used = asyncio.Event()

    def script(seen: dict[str, Any]) -> Item:
        if turn_count(seen):
            used.set()
            return Held(submit("never"), asyncio.Event())
        return Held(Refusal(400, "not you"), used) if next(fails) else MAKE

    fails = iter([False, True])
    sandboxes = MemorySandboxes()
    async with scripted_backend(script) as backend:
        model = model_client(backend)
        async with (
            serve(make_services(model, sandboxes, tmp_path, profiles=AT_ONCE)) as url,
            openai_client(url) as client,
        ):
            with anyio.fail_after(30):
                error = await request_error(client, n=2)
                for seen in backend.requests:  # the held request is closed
                    if turn_count(seen.body):
                        await seen.gone.wait()
        await model.aclose()
    assert (sandboxes.opened, sandboxes.closed) == (2, 2)
    assert isinstance(error, openai.BadRequestError)
    assert "not you" in error.message
    assert error.response.headers["x-should-retry"] == "false"
