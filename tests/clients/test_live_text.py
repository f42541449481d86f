"""Streaming as a person sees it, in each API: narration, steps, then the answer."""

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
from tests.clients import chat_http, messages_http, responses_sdk
from tests.fakes.backend import Held, Item, by_history, scripted_backend
from tests.fakes.server import running_proxy

ESSAY = "Sandboxes are older than models, and older than computers. " * 6 + "So it is."
NARRATION = "I look at the files first, for nothing else can tell what is in them. " * 4 + "Now."
BASH = tool_reply(call("execute_bash", command="echo one"))
NARRATED_BASH = {**BASH, "content": NARRATION}
SUBMIT = tool_reply(call("submit", answer="There are 42."))
NARRATED_RUN = by_history([NARRATED_BASH, SUBMIT])
BEFORE_160 = 4
"""Number of pieces of 8 characters; so few are shown only after a time limit."""
AFTER_160 = 24

OnText = Callable[[str], None]
"""Called with all text shown so far."""
Headers = Mapping[str, str] | None


def ignore(shown: str) -> None:
    """Ignore what is shown."""


async def chat_stream(url: str, on_text: OnText, headers: Headers = None) -> str:
    shown = ""
    async with responses_sdk.client_with_key(url, "none") as client:
        stream = await client.chat.completions.create(
            **chat_http.BODY, stream=True, extra_headers=headers
        )
        async for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                on_text(shown := shown + text)
    return shown


async def chat_non_streamed(url: str, headers: Headers = None) -> str:
    async with responses_sdk.client_with_key(url, "none") as client:
        completion = await client.chat.completions.create(**chat_http.BODY, extra_headers=headers)
    text: str = completion.choices[0].message.content
    return text


async def responses_stream(url: str, on_text: OnText, headers: Headers = None) -> str:
    shown = ""
    async with responses_sdk.client_with_key(url, "none") as client:
        stream = await client.responses.create(
            model=responses_sdk.MODEL, input="How many?", stream=True, extra_headers=headers
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                on_text(shown := shown + event.delta)
    return shown


async def responses_non_streamed(url: str, headers: Headers = None) -> str:
    async with responses_sdk.client_with_key(url, "none") as client:
        return (
            await responses_sdk.create_response(client, "How many?", extra_headers=headers)
        ).output_text


async def messages_stream(url: str, on_text: OnText, headers: Headers = None) -> str:
    shown = ""
    body = {**messages_http.BODY, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("POST", messages_http.PATH, json=body, headers=headers) as response,
    ):
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_delta" and "text" in event["delta"]:
                on_text(shown := shown + event["delta"]["text"])
    return shown


async def messages_non_streamed(url: str, headers: Headers = None) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        response = await client.post(messages_http.PATH, json=messages_http.BODY, headers=headers)
    return "".join(messages_http.texts(response.json()))


@dataclass(frozen=True)
class Api:
    """The functions that call one API, streamed and not, and return the text that a person sees."""

    stream: Callable[..., Awaitable[str]]
    non_streamed: Callable[..., Awaitable[str]]


APIS = {
    "chat": Api(chat_stream, chat_non_streamed),
    "responses": Api(responses_stream, responses_non_streamed),
    "messages": Api(messages_stream, messages_non_streamed),
}
every_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())


@every_api
@pytest.mark.parametrize(
    "before", [[], [BASH], [NARRATED_BASH]], ids=["first", "after a tool", "narrated"]
)
@pytest.mark.parametrize("pieces", [AFTER_160, BEFORE_160], ids=["by length", "by time"])
async def test_prose_is_streamed_before_the_backend_has_sent_the_rest(
    tmp_path: Path, api: Api, before: Sequence[Item], pieces: int
) -> None:
    seen = asyncio.Event()

    def on_text(shown: str) -> None:
        if ESSAY[:9] in shown:
            seen.set()

    script = [*before, Held(text_reply(ESSAY), seen, after_pieces=pieces)]
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            shown = await api.stream(url, on_text)
    assert shown == (f"{NARRATION}\n\n{ESSAY}" if NARRATED_BASH in before else ESSAY)


@every_api
@pytest.mark.parametrize("last", [SUBMIT, text_reply("There are 42.")], ids=["submit", "prose"])
async def test_narration_is_streamed_but_not_part_of_an_unstreamed_answer(
    tmp_path: Path, api: Api, last: dict[str, Any]
) -> None:
    with anyio.fail_after(40):
        async with (
            scripted_backend(by_history([NARRATED_BASH, last])) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            streamed = await api.stream(url, ignore)
            whole = await api.non_streamed(url)
    assert streamed == f"{NARRATION}\n\nThere are 42."
    assert whole == "There are 42."


@every_api
async def test_only_the_answer_is_streamed_as_content_if_narration_is_set_to_reasoning(
    tmp_path: Path, api: Api
) -> None:
    script = by_history([NARRATED_BASH, {**BASH, "content": NARRATION}, SUBMIT])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, narration="reasoning") as url,
        ):
            assert await api.stream(url, ignore) == "There are 42."
            assert await api.non_streamed(url) == "There are 42."


@every_api
async def test_submitted_answer_that_was_streamed_is_not_repeated(tmp_path: Path, api: Api) -> None:
    submit_essay = tool_reply(call("submit", answer=f"{ESSAY}\n"), content=ESSAY)
    with anyio.fail_after(40):
        async with (
            scripted_backend(by_history([BASH, submit_essay])) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
        ):
            streamed = await api.stream(url, ignore)
    assert streamed.split() == ESSAY.split()


# A stream that is joined


@every_api
async def test_late_subscriber_sees_the_complete_text(tmp_path: Path, api: Api) -> None:
    headers = {"Idempotency-Key": "k"}
    narrated, joined = asyncio.Event(), asyncio.Event()
    shown: list[str] = []
    script: list[Item] = [NARRATED_BASH, Held(SUBMIT, joined)]
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
            whole = await api.non_streamed(url, headers)
    assert [*shown, after] == [f"{NARRATION}\n\nThere are 42."] * 3
    assert whole == "There are 42."
    assert len(backend.requests) == 2


# Redaction


SECRET = "ghp_" + "q7R2" * 9
REDACTED = Profiles.only(Profile(redaction=Redaction(("all",))))
LONG = "All is well here, and nothing is amiss. " * 12


@every_api
async def test_secret_is_redacted_in_narration_and_answer(tmp_path: Path, api: Api) -> None:
    narration = f"{LONG}It is {SECRET}. {LONG}"
    script = by_history([{**BASH, "content": narration}, text_reply(narration)])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, profiles=REDACTED) as url,
        ):
            streamed = await api.stream(url, ignore)
            whole = await api.non_streamed(url)
    shown = f"{LONG}It is [redacted github]. {LONG}"
    assert streamed.rstrip() == f"{shown}\n\n{shown}".rstrip()
    assert whole.strip() == shown.strip()
