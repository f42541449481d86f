"""Deadlines of clients: the answer is requested in time, or the request fails with 504."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import answer_text, http_client, post_chat
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.server import running_proxy


def slow_second_turn(body: dict[str, Any]) -> Item:
    """Call a tool, never finish the second turn, and answer once no tools are offered."""
    if len(body["messages"]) == 2:
        return tool_reply(call("execute_bash", command="ls"))
    if "tools" in body:
        return Held(text_reply("Never said."), asyncio.Event())
    return text_reply("About 42.")


@pytest.mark.parametrize(
    ("headers", "sandbox", "stream"),
    [({"X-Sandbox-Deadline": "4"}, {}, False), ({}, {"deadline_s": 4}, True)],
)
async def test_final_answer_is_requested_before_the_deadline(
    headers: dict[str, str], sandbox: dict[str, float], stream: bool, tmp_path: Path
) -> None:
    async with (
        scripted_backend(slow_second_turn) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            response = await post_chat(http, headers, stream=stream, sandbox=sandbox)
    assert answer_text(response) == "About 42."
    assert '"stop_reason": "deadline"' in response.text
    assert len(backend.requests) == 3


async def test_sdk_timeout_is_taken_as_a_deadline(tmp_path: Path) -> None:
    async with (
        scripted_backend(slow_second_turn) as backend,
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


async def test_missed_deadline_is_a_504_without_a_retry(tmp_path: Path) -> None:
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
    assert len(backend.requests) <= 2  # one turn and the final question


async def test_read_timeout_of_the_sdk_does_not_limit_a_stream(tmp_path: Path) -> None:
    """Keep-alive comments satisfy the client's read timeout, however long the run takes."""
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        body = {"model": "fake-model", "messages": MESSAGES, "stream": True}
        headers = {"x-stainless-read-timeout": "0.3"}
        post = partial(http.stream, "POST", "/v1/chat/completions", json=body, headers=headers)
        with anyio.fail_after(20):
            async with post() as response:
                read = ""
                async for piece in response.aiter_text():
                    read += piece
                    if (
                        read.count(": keep-alive") > 4
                    ):  # the stream outlived the read timeout of 0.3 s
                        release.set()
    assert '"content": "42"' in read
    assert '"stop_reason": "answered"' in read
    assert len(backend.requests) == 1
