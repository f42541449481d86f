"""A model with a context of 4,096 tokens, and runs that need more."""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from policies.isolation import Isolation, Level
from policies.prompts import SUMMARY_REQUEST
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import REAL_KINDS, Kind, running_proxy
from tests.fakes.small_window import Refuse, SmallWindow, tokens, vllm, wordless
from tests.proxy.agent.runs import valid

ASK = [
    {"role": "system", "content": "You look for codes."},
    {"role": "user", "content": "What is the code in the third part?"},
]
PATH = re.compile(r"/testbed/\.observations/[\w.-]+")
FOUND = re.compile(r"code=(\d+)")
STEPS = 12
"""Of 1,200 lines each, all together about ten times what the context takes."""


def searching(body: Mapping[str, Any]) -> dict[str, Any]:
    """A model that prints all parts, and then has the code looked for where the whole texts lie.

    It remembers nothing: what it knows is in the messages, its own summary among them.
    """
    said = json.dumps(body["messages"])
    last = str(body["messages"][-1]["content"])
    paths = list(dict.fromkeys(PATH.findall(said)))
    if last.startswith(SUMMARY_REQUEST[:40]):
        return text_reply(f"Printed {_printed(said)} parts. They are in: {' '.join(paths)}")
    if found := FOUND.search(last):
        return tool_reply(call("submit", answer=found[1]))
    if _printed(said) < STEPS:
        part = _printed(said) + 1
        code = "echo code=$((47 * 100 + 11));" if part == 3 else ""
        lines = f"seq {part}00001 {part}00600"
        return tool_reply(call("execute_bash", command=f": part {part}; {lines}; {code} {lines}"))
    return tool_reply(call("execute_bash", command=f"grep -ho code=.* {' '.join(paths)}"))


def _prompt(body: Mapping[str, Any]) -> int:
    return tokens([body["messages"], body.get("tools")])


def _printed(said: str) -> int:
    parts = [int(n) for n in re.findall(r": part (\d+);", said)]
    parts += [int(n) for n in re.findall(r"Printed (\d+) parts", said)]
    return max(parts, default=0)


@asynccontextmanager
async def proxied(
    play: SmallWindow,
    kind: Kind,
    tmp_path: Path,
    *,
    listed: int | None = 4096,
    level: Level = "standard",
) -> AsyncIterator[openai.AsyncOpenAI]:
    with anyio.fail_after(120):
        async with (
            scripted_backend(play, window=listed) as backend,
            running_proxy(backend, kind, tmp_path, Isolation(level=level)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


async def asked(client: openai.AsyncOpenAI, messages: Any = ASK, **more: Any) -> Any:
    return await client.chat.completions.create(model="fake-model", messages=messages, **more)


def assert_sound(bodies: Sequence[Mapping[str, Any]], client: Sequence[Any] = ASK) -> None:
    """What a backend takes, and all that the client has said, word for word."""
    for body in bodies:
        assert valid(body)
        system, *rest = body["messages"]
        assert system["content"].endswith(client[0]["content"])
        assert rest[: len(client) - 1] == list(client[1:])


@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize("level", ["standard", "strict"])
async def test_what_had_no_room_is_found_in_a_file(
    kind: Kind, level: Level, tmp_path: Path
) -> None:
    play = SmallWindow(searching)
    async with proxied(play, kind, tmp_path, level=level) as client:
        answer = await asked(client)
    assert answer.choices[0].message.content == "4711"
    told = answer.model_extra["sandbox"]
    assert (told["stop_reason"], told["files"]) == ("submitted", [])
    assert {each["kind"] for each in told["compactions"]} == {"stubs", "summary"}
    assert told["segments"] == len(told["compactions"]) + 1
    assert all(each["tokens_after"] < each["tokens_before"] for each in told["compactions"])
    assert answer.usage.prompt_tokens == sum(_prompt(body) for body in play.bodies) > 3 * 4096
    assert play.refused == 0
    assert_sound(play.bodies)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reports", [True, False], ids=["usage", "no usage"])
@pytest.mark.parametrize("listed", [4096, None, 1_000_000, 300], ids=str)
@pytest.mark.parametrize("refuse", [vllm, wordless])
async def test_whatever_is_told_of_the_window_the_run_comes_to_its_end(
    tmp_path: Path, refuse: Refuse, listed: int | None, reports: bool, stream: bool
) -> None:
    def counting(body: Mapping[str, Any]) -> dict[str, Any]:
        if str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40]):
            return text_reply(f"Printed {_printed(json.dumps(body['messages']))} parts.")
        part = _printed(json.dumps(body["messages"])) + 1
        if part > STEPS:
            return tool_reply(call("submit", answer="4711"))
        command = f": part {part}; seq 100001 100600; seq 100001 100600"
        return tool_reply(call("execute_bash", command=command))

    play = SmallWindow(counting, refuse=refuse, reports=reports)
    async with proxied(play, "memory", tmp_path, listed=listed) as client:
        if stream:
            chunks = [chunk async for chunk in await asked(client, stream=True)]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        else:
            text = (await asked(client)).choices[0].message.content
    assert text == "4711"
    assert_sound(play.bodies)
    if listed == 4096 and reports:
        assert play.refused == 0


async def test_a_window_learnt_from_one_refusal_serves_the_next_run(tmp_path: Path) -> None:
    play = SmallWindow(searching)
    async with proxied(play, "bubblewrap", tmp_path, listed=None) as client:
        await asked(client)
        refused = play.refused
        assert refused > 0
        await asked(client)
    assert play.refused == refused


async def test_a_turn_that_has_more_room_than_the_window_is_made_to_fit(tmp_path: Path) -> None:
    play = SmallWindow(lambda body: text_reply("42"), window=2048)
    async with proxied(play, "memory", tmp_path, listed=None) as client:
        answer = await asked(client, max_tokens=10)
    assert answer.choices[0].message.content == "42"
    (body,) = play.bodies
    assert (play.refused, 10 <= body["max_tokens"] < 2048) == (1, True)


async def test_a_request_that_is_too_long_itself_is_a_400_as_without_the_proxy(
    tmp_path: Path,
) -> None:
    play = SmallWindow(searching)
    async with proxied(play, "memory", tmp_path) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await asked(client, [{"role": "system", "content": "x" * 20_000}, ASK[1]])
    assert (raised.value.code, play.bodies) == ("context_length_exceeded", [])
