"""Whitespace sent before an unstreamed answer, for gateways and clients with a read timeout."""

import asyncio
from pathlib import Path

import anyio
import httpx
import openai
import pytest

from proxy.models.scripted import text_reply
from tests.clients.chat_http import BODY, PATH, http_client, post_chat
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import running_proxy

KEEP_ALIVE = {"nonstream_keep_alive_s": 0.01}


@pytest.mark.parametrize("read_timeout_s", [None, 0.3])
async def test_sdk_reads_an_answer_after_keep_alive_blanks(
    read_timeout_s: float | None, tmp_path: Path
) -> None:
    """A client with a read timeout gets whitespace in time, so the timeout is not taken as a
    deadline.
    """
    release = asyncio.Event()
    keep_alive_s = 0.01 if read_timeout_s is None else 3600

    async def release_on_response(response: httpx.Response) -> None:
        release.set()

    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, nonstream_keep_alive_s=keep_alive_s) as url,
        httpx.AsyncClient(event_hooks={"response": [release_on_response]}) as http,
    ):
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        with anyio.fail_after(20):
            completion = await sdk.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                extra_headers={"x-stainless-read-timeout": str(read_timeout_s)},
            )
    assert completion.choices[0].message.content == "42"
    assert (completion.model_extra or {})["sandbox"]["stop_reason"] == "answered"
    assert len(backend.requests) == 1


async def test_keep_alive_blanks_are_sent_until_the_answer(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, **KEEP_ALIVE) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=BODY) as response:
                read = ""
                async for piece in response.aiter_text():
                    read += piece
                    if len(read) > 10:
                        release.set()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-sandbox-run"] in read
    blanks, _, rest = read.partition("{")
    assert (blanks.strip(), len(blanks) > 10, rest[-1]) == ("", True, "}")


@pytest.mark.parametrize("sends_blanks", [False, True])
async def test_error_keeps_its_status_if_no_keep_alive_blank_was_sent(
    sends_blanks: bool, tmp_path: Path
) -> None:
    release = asyncio.Event()

    def refuse(body: object) -> Item:
        return Refusal(400, "refused")

    held = Held(text_reply(""), release)  # an empty reply makes the agent call the model again
    script = [held, Refusal(400, "refused")] if sends_blanks else refuse
    async with (
        scripted_backend(script) as backend,
        running_proxy(
            backend, "memory", tmp_path, nonstream_keep_alive_s=0.01 if sends_blanks else 3600
        ) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=BODY) as response:
                release.set()
                await response.aread()
    assert response.status_code == (200 if sends_blanks else 400)
    assert response.json()["error"]["message"] == "refused"


async def test_disconnect_between_keep_alive_blanks_ends_the_run(tmp_path: Path) -> None:
    async with (
        scripted_backend([Held(text_reply("Never said."), asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path, **KEEP_ALIVE) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=BODY):
                seen = await backend.arrived(1)
            await seen.gone.wait()


async def test_fast_answer_has_no_keep_alive_blanks(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path, nonstream_keep_alive_s=3600) as url,
        http_client(url) as http,
    ):
        response = await post_chat(http)
    assert response.text.startswith("{")
