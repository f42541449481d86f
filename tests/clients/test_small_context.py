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

MESSAGES = [
    {"role": "system", "content": "You look for codes."},
    {"role": "user", "content": "What is the code in the third part?"},
]
PATH = re.compile(r"/testbed/\.observations/[\w.-]+")
FOUND = re.compile(r"code=(\d+)")
STEPS = 12
"""Number of parts of 1,200 lines; together about ten times the context window."""


def search_reply(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply of a model that prints all parts and then searches the saved observations.

    The model keeps no state: everything is in the messages, including its own summary.
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
async def small_context_client(
    model: SmallWindow,
    kind: Kind,
    tmp_path: Path,
    *,
    listed: int | None = 4096,
    level: Level = "standard",
) -> AsyncIterator[openai.AsyncOpenAI]:
    with anyio.fail_after(120):
        async with (
            scripted_backend(model, window=listed) as backend,
            running_proxy(backend, kind, tmp_path, Isolation(level=level)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


async def complete(client: openai.AsyncOpenAI, messages: Any = MESSAGES, **more: Any) -> Any:
    return await client.chat.completions.create(model="fake-model", messages=messages, **more)


def assert_sound(bodies: Sequence[Mapping[str, Any]], client: Sequence[Any] = MESSAGES) -> None:
    """Assert that the bodies are valid and contain every client message unchanged."""
    for body in bodies:
        assert valid(body)
        system, *rest = body["messages"]
        assert system["content"].endswith(client[0]["content"])
        assert rest[: len(client) - 1] == list(client[1:])


@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize("level", ["standard", "strict"])
async def test_model_finds_a_compacted_observation_in_its_saved_file(
    kind: Kind, level: Level, tmp_path: Path
) -> None:
    model = SmallWindow(search_reply)
    async with small_context_client(model, kind, tmp_path, level=level) as client:
        answer = await complete(client)
    assert answer.choices[0].message.content == "4711"
    sandbox = answer.model_extra["sandbox"]
    assert (sandbox["stop_reason"], sandbox["files"]) == ("submitted", [])
    assert {each["kind"] for each in sandbox["compactions"]} == {"stubs", "summary"}
    assert sandbox["segments"] == len(sandbox["compactions"]) + 1
    assert all(each["tokens_after"] < each["tokens_before"] for each in sandbox["compactions"])
    assert answer.usage.prompt_tokens == sum(_prompt(body) for body in model.bodies) > 3 * 4096
    assert model.refused == 0
    assert_sound(model.bodies)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reports", [True, False], ids=["usage", "no usage"])
@pytest.mark.parametrize("listed", [4096, None, 1_000_000, 300], ids=str)
@pytest.mark.parametrize("refuse", [vllm, wordless])
async def test_run_finishes_whatever_context_window_the_backend_reports(
    tmp_path: Path, refuse: Refuse, listed: int | None, reports: bool, stream: bool
) -> None:
    def count_reply(body: Mapping[str, Any]) -> dict[str, Any]:
        if str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40]):
            return text_reply(f"Printed {_printed(json.dumps(body['messages']))} parts.")
        part = _printed(json.dumps(body["messages"])) + 1
        if part > STEPS:
            return tool_reply(call("submit", answer="4711"))
        command = f": part {part}; seq 100001 100600; seq 100001 100600"
        return tool_reply(call("execute_bash", command=command))

    model = SmallWindow(count_reply, refuse=refuse, reports=reports)
    async with small_context_client(model, "memory", tmp_path, listed=listed) as client:
        if stream:
            chunks = [chunk async for chunk in await complete(client, stream=True)]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        else:
            text = (await complete(client)).choices[0].message.content
    assert text == "4711"
    assert_sound(model.bodies)
    if listed == 4096 and reports:
        assert model.refused == 0


async def test_context_window_learned_from_a_refusal_is_reused(tmp_path: Path) -> None:
    model = SmallWindow(search_reply)
    async with small_context_client(model, "bubblewrap", tmp_path, listed=None) as client:
        await complete(client)
        refused = model.refused
        assert refused > 0
        await complete(client)
    assert model.refused == refused


async def test_max_tokens_is_reduced_to_the_context_window(tmp_path: Path) -> None:
    model = SmallWindow(lambda body: text_reply("42"), window=2048)
    async with small_context_client(model, "memory", tmp_path, listed=None) as client:
        answer = await complete(client, max_tokens=10)
    assert answer.choices[0].message.content == "42"
    (body,) = model.bodies
    assert (model.refused, 10 <= body["max_tokens"] < 2048) == (1, True)


async def test_request_over_the_context_window_is_a_400(
    tmp_path: Path,
) -> None:
    model = SmallWindow(search_reply)
    async with small_context_client(model, "memory", tmp_path) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await complete(client, [{"role": "system", "content": "x" * 20_000}, MESSAGES[1]])
    assert (raised.value.code, model.bodies) == ("context_length_exceeded", [])
