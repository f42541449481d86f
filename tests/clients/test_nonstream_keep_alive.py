"""Blanks before an answer in one piece, for gateways and clients that hang up in silence."""

import asyncio
from pathlib import Path

import anyio
import httpx
import openai
import pytest

from proxy.models.scripted import text_reply
from tests.clients.chat import ASKED, PATH, ask, client
from tests.clients.errors import ASKED as MESSAGES
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import running_proxy

SOON = {"nonstream_keep_alive_s": 0.01}


@pytest.mark.parametrize("patience_s", [None, 0.3])
async def test_the_answer_follows_the_blanks_and_the_sdk_reads_it(
    patience_s: float | None, tmp_path: Path
) -> None:
    """A client that says how long it waits hears of us before; its deadline is none, then."""
    release = asyncio.Event()
    keep_alive_s = 0.01 if patience_s is None else 3600

    async def its_head_is_here(response: httpx.Response) -> None:
        release.set()

    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, nonstream_keep_alive_s=keep_alive_s) as url,
        httpx.AsyncClient(event_hooks={"response": [its_head_is_here]}) as http,
    ):
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        with anyio.fail_after(20):
            completion = await sdk.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                extra_headers={"x-stainless-read-timeout": str(patience_s)},
            )
    assert completion.choices[0].message.content == "42"
    assert (completion.model_extra or {})["sandbox"]["stop_reason"] == "answered"
    assert len(backend.requests) == 1


async def test_blanks_go_on_until_the_answer_is_there(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("42"), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, **SOON) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=ASKED) as response:
                read = ""
                async for piece in response.aiter_text():
                    read += piece
                    if len(read) > 10:
                        release.set()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-sandbox-run"] in read
    blanks, _, rest = read.partition("{")
    assert (blanks.strip(), len(blanks) > 10, rest[-1]) == ("", True, "}")


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_has_its_status_only_where_no_blank_was_sent(
    waits: bool, tmp_path: Path
) -> None:
    release = asyncio.Event()

    def refuse(body: object) -> Item:
        return Refusal(400, "refused")

    held = Held(text_reply(""), release)  # an empty reply: the model is asked once more
    script = [held, Refusal(400, "refused")] if waits else refuse
    async with (
        scripted_backend(script) as backend,
        running_proxy(
            backend, "memory", tmp_path, nonstream_keep_alive_s=0.01 if waits else 3600
        ) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=ASKED) as response:
                release.set()
                await response.aread()
    assert response.status_code == (200 if waits else 400)
    assert response.json()["error"]["message"] == "refused"


async def test_who_leaves_while_blanks_are_sent_ends_the_run(tmp_path: Path) -> None:
    async with (
        scripted_backend([Held(text_reply("Never said."), asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path, **SOON) as url,
        client(url) as http,
    ):
        with anyio.fail_after(20):
            async with http.stream("POST", PATH, json=ASKED):
                seen = await backend.arrived(1)
            await seen.gone.wait()


async def test_an_answer_that_comes_soon_has_no_blanks(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path, nonstream_keep_alive_s=3600) as url,
        client(url) as http,
    ):
        response = await ask(http)
    assert response.text.startswith("{")
