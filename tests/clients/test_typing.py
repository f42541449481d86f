"""Who watches a stream sees the model typing, in each API: narration, steps, then the answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.profile import Profile
from policies.redaction import Redaction
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients import chat, messages, responses
from tests.fakes.backend import Held, Item, by_history, scripted_backend
from tests.fakes.server import running_proxy

ESSAY = "Sandboxes are older than models, and older than computers. " * 6 + "So it is."
NARRATION = "I look at the files first, for nothing else can tell what is in them. " * 4 + "Now."
BASH = tool_reply(call("execute_bash", command="echo one"))
TOLD = {**BASH, "content": NARRATION}
SUBMIT = tool_reply(call("submit", answer="There are 42."))
WORK = by_history([TOLD, SUBMIT])
BEFORE_160 = 4
"""Pieces of 8 characters: time must have them shown."""
AFTER_160 = 24

See = Callable[[str], None]
"""Is told all that is to be seen by now."""
Headers = Mapping[str, str] | None


def ignore(shown: str) -> None:
    """See nothing."""


async def chat_stream(url: str, see: See, headers: Headers = None) -> str:
    shown = ""
    async with responses.at(url, "none") as client:
        stream = await client.chat.completions.create(
            **chat.ASKED, stream=True, extra_headers=headers
        )
        async for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                see(shown := shown + text)
    return shown


async def chat_whole(url: str, headers: Headers = None) -> str:
    async with responses.at(url, "none") as client:
        completion = await client.chat.completions.create(**chat.ASKED, extra_headers=headers)
    text: str = completion.choices[0].message.content
    return text


async def responses_stream(url: str, see: See, headers: Headers = None) -> str:
    shown = ""
    async with responses.at(url, "none") as client:
        stream = await client.responses.create(
            model=responses.MODEL, input="How many?", stream=True, extra_headers=headers
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                see(shown := shown + event.delta)
    return shown


async def responses_whole(url: str, headers: Headers = None) -> str:
    async with responses.at(url, "none") as client:
        return (await responses.ask(client, "How many?", extra_headers=headers)).output_text


async def messages_stream(url: str, see: See, headers: Headers = None) -> str:
    shown = ""
    asked = {**messages.ASKED, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("POST", messages.PATH, json=asked, headers=headers) as response,
    ):
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_delta" and "text" in event["delta"]:
                see(shown := shown + event["delta"]["text"])
    return shown


async def messages_whole(url: str, headers: Headers = None) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        response = await client.post(messages.PATH, json=messages.ASKED, headers=headers)
    return "".join(messages.texts(response.json()))


@dataclass(frozen=True)
class Api:
    """How one of the APIs is asked, and what a person sees of the answer."""

    stream: Callable[..., Awaitable[str]]
    whole: Callable[..., Awaitable[str]]


APIS = {
    "chat": Api(chat_stream, chat_whole),
    "responses": Api(responses_stream, responses_whole),
    "messages": Api(messages_stream, messages_whole),
}
every_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())


@every_api
@pytest.mark.parametrize("before", [[], [BASH], [TOLD]], ids=["first", "after a tool", "narrated"])
@pytest.mark.parametrize("pieces", [AFTER_160, BEFORE_160], ids=["by length", "by time"])
async def test_prose_shows_while_the_backend_holds_the_rest(
    tmp_path: Path, api: Api, before: Sequence[Item], pieces: int
) -> None:
    seen = asyncio.Event()

    def see(shown: str) -> None:
        if ESSAY[:9] in shown:
            seen.set()

    script = [*before, Held(text_reply(ESSAY), seen, after_pieces=pieces)]
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            shown = await api.stream(url, see)
    assert shown == (f"{NARRATION}\n\n{ESSAY}" if TOLD in before else ESSAY)


@every_api
@pytest.mark.parametrize("last", [SUBMIT, text_reply("There are 42.")], ids=["submit", "prose"])
async def test_narration_stays_in_a_stream_and_is_no_part_of_a_whole_answer(
    tmp_path: Path, api: Api, last: dict[str, Any]
) -> None:
    with anyio.fail_after(40):
        async with (
            scripted_backend(by_history([TOLD, last])) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            streamed = await api.stream(url, ignore)
            whole = await api.whole(url)
    assert streamed == f"{NARRATION}\n\nThere are 42."
    assert whole == "There are 42."


@every_api
async def test_strict_separation_streams_the_answer_alone(tmp_path: Path, api: Api) -> None:
    script = by_history([TOLD, {**BASH, "content": NARRATION}, SUBMIT])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, narration="reasoning") as url,
        ):
            assert await api.stream(url, ignore) == "There are 42."
            assert await api.whole(url) == "There are 42."


@every_api
async def test_answer_handed_in_that_was_streamed_is_not_sent_again(
    tmp_path: Path, api: Api
) -> None:
    handed_in = tool_reply(call("submit", answer=f"{ESSAY}\n"), content=ESSAY)
    with anyio.fail_after(40):
        async with (
            scripted_backend(by_history([BASH, handed_in])) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            streamed = await api.stream(url, ignore)
    assert streamed.split() == ESSAY.split()


# A stream that is joined


@every_api
async def test_who_joins_a_run_late_sees_what_the_first_one_saw(tmp_path: Path, api: Api) -> None:
    headers = {"Idempotency-Key": "k"}
    narrated, joined = asyncio.Event(), asyncio.Event()
    shown: list[str] = []
    script: list[Item] = [TOLD, Held(SUBMIT, joined)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):

        async def first() -> None:
            shown.append(await api.stream(url, lambda _: narrated.set(), headers))

        with anyio.fail_after(40):
            async with anyio.create_task_group() as group:
                group.start_soon(first)
                await narrated.wait()
                await backend.arrived(2)
                shown.append(await api.stream(url, lambda _: joined.set(), headers))
            after = await api.stream(url, ignore, headers)
            whole = await api.whole(url, headers)
    assert [*shown, after] == [f"{NARRATION}\n\nThere are 42."] * 3
    assert whole == "There are 42."
    assert len(backend.requests) == 2


# Redaction


SECRET = "ghp_" + "q7R2" * 9
REDACTED = Profiles.only(Profile(redaction=Redaction(("all",))))
LONG = "All is well here, and nothing is amiss. " * 12


@every_api
async def test_secret_shows_neither_in_live_narration_nor_in_the_answer(
    tmp_path: Path, api: Api
) -> None:
    said = f"{LONG}It is {SECRET}. {LONG}"
    script = by_history([{**BASH, "content": said}, text_reply(said)])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, profiles=REDACTED) as url,
        ):
            streamed = await api.stream(url, ignore)
            whole = await api.whole(url)
    shown = f"{LONG}It is [redacted github]. {LONG}"
    assert streamed.rstrip() == f"{shown}\n\n{shown}".rstrip()
    assert whole.strip() == shown.strip()
