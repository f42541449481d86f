"""Clients that wait only so long get an answer before they hang up."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat import answer, ask, client
from tests.clients.errors import ASKED as MESSAGES
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.server import running_proxy


def slow(body: dict[str, Any]) -> Item:
    """A model that never comes to the end of a turn, but knows the answer."""
    if len(body["messages"]) == 2:
        return tool_reply(call("execute_bash", command="ls"))
    if "tools" in body:
        return Held(text_reply("Never said."), asyncio.Event())
    return text_reply("About 42.")


@pytest.mark.parametrize(
    ("headers", "ours", "stream"),
    [({"X-Sandbox-Deadline": "4"}, {}, False), ({}, {"deadline_s": 4}, True)],
)
async def test_a_deadline_has_the_answer_asked_for_in_time(
    headers: dict[str, str], ours: dict[str, float], stream: bool, tmp_path: Path
) -> None:
    async with (
        scripted_backend(slow) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            response = await ask(http, headers, stream=stream, sandbox=ours)
    assert answer(response) == "About 42."
    assert '"stop_reason": "deadline"' in response.text
    assert len(backend.requests) == 3


async def test_an_sdk_s_own_timeout_is_a_deadline(tmp_path: Path) -> None:
    async with (
        scripted_backend(slow) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
    ):
        with anyio.fail_after(20):
            completion = await sdk.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                extra_headers={"x-stainless-read-timeout": "4"},
            )
    assert completion.choices[0].message.content == "About 42."
    assert (completion.model_extra or {})["sandbox"]["stop_reason"] == "deadline"


async def test_no_answer_in_time_is_an_error_that_is_not_asked_for_again(tmp_path: Path) -> None:
    def stuck(body: dict[str, Any]) -> Item:
        return Held(text_reply("Never said."), asyncio.Event())

    async with (
        scripted_backend(stuck) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as sdk,
    ):
        with anyio.fail_after(20), pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(
                model="fake-model", messages=MESSAGES, extra_headers={"X-Sandbox-Deadline": "0.2"}
            )
    assert caught.value.status_code == 504
    assert "the client's deadline of 0.2 s" in caught.value.message
    assert len(backend.requests) <= 2  # a turn, and the last words


async def test_a_stream_is_not_bounded_by_the_time_between_two_bytes(tmp_path: Path) -> None:
    """It is told in good time that the run is alive, and takes as long as it takes."""
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client(url) as http,
    ):
        body = {"model": "fake-model", "messages": MESSAGES, "stream": True}
        headers = {"x-stainless-read-timeout": "0.3"}
        post = partial(http.stream, "POST", "/v1/chat/completions", json=body, headers=headers)
        with anyio.fail_after(20):
            async with post() as response:
                read = ""
                async for piece in response.aiter_text():
                    read += piece
                    if read.count(": keep-alive") > 4:  # more than the 0.3 s
                        release.set()
    assert '"content": "42"' in read
    assert '"stop_reason": "answered"' in read
    assert len(backend.requests) == 1
