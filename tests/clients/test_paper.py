"""What a client's own wishes become in the paper's manner."""

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.paper_words import PaperWords
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.paper import paper
from tests.fakes.server import house

WORDS = PaperWords(system="Work.", instance="<{problem_statement}>", no_call="\nC\n")
USER = {"role": "user", "content": "6*7?"}
DONE = tool_reply(call("submit", answer="42"))
LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}},
}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


async def requests(tmp_path: Path, *replies: Item, **body: Any) -> list[dict[str, Any]]:
    """What the backend was sent for one request, which was answered with 42."""
    async with (
        scripted_backend(replies) as backend,
        house(backend, "memory", tmp_path, profiles=Profiles.only(paper(WORDS))) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        with anyio.fail_after(60):
            asked = {"model": "m", "messages": [USER], **body}
            response = await client.post(f"{url}/v1/chat/completions", json=asked)
        assert response.json()["choices"][0]["message"]["content"] == "42", response.text
        return [request.body for request in backend.requests]


def parameters(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("messages", "tools")}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {"temperature": 1.0, "max_tokens": 65_536}),
        (
            {"temperature": 0.2, "top_p": 0.9},
            {"temperature": 0.2, "top_p": 0.9, "max_tokens": 65_536},
        ),
        ({"max_tokens": 500}, {"temperature": 1.0, "max_tokens": 500}),
        ({"max_completion_tokens": 500}, {"temperature": 1.0, "max_completion_tokens": 500}),
        ({"model": "o3-mini"}, {"model": "o3-mini", "max_tokens": 65_536}),
    ],
)
async def test_what_the_client_asks_for_goes_with_each_turn_before_the_references_defaults(
    tmp_path: Path, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    seen = await requests(tmp_path, text_reply("Hm."), DONE, **asked)
    assert [parameters(body) for body in seen] == [{"model": "m", **sent}] * 2


async def test_a_backend_without_room_for_so_many_tokens_is_left_to_its_own_limit(
    tmp_path: Path,
) -> None:
    full = Refusal(400, "This model's maximum context length is 32768 tokens.")
    seen = await requests(tmp_path, full, text_reply("Hm."), DONE)
    assert [body.get("max_tokens") for body in seen] == [65_536, None, None]
    assert seen[0]["messages"] == seen[1]["messages"]


async def test_the_last_that_the_user_said_is_the_problem_and_instructions_follow_ours(
    tmp_path: Path,
) -> None:
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
    ]
    (body,) = await requests(tmp_path, DONE, messages=[*before, USER])
    assert body["messages"] == [
        {"role": "system", "content": "Work.\n\nBe brief."},
        *before[1:],
        {"role": "user", "content": "<6*7?>\nSteps Remaining: 100"},
    ]


async def test_what_is_said_of_a_computer_elsewhere_is_not_said_here(tmp_path: Path) -> None:
    (body,) = await requests(tmp_path, DONE, sandbox={"prompt": "strict"})
    assert body["messages"][0] == {"role": "system", "content": "Work."}


async def test_pictures_stay_beside_the_problem(tmp_path: Path) -> None:
    parts = [PICTURE, {"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    (body,) = await requests(tmp_path, DONE, messages=[{"role": "user", "content": parts}])
    text, picture, steps = body["messages"][-1]["content"]
    assert text["text"].startswith("<")
    assert "What is it?" in text["text"]
    assert picture == PICTURE
    assert steps == {"type": "text", "text": "\nSteps Remaining: 100"}


async def test_calls_written_as_text_are_no_calls(tmp_path: Path) -> None:
    written = '<tool_call>{"name": "submit", "arguments": {"answer": "41"}}</tool_call>'
    seen = await requests(tmp_path, text_reply(written), DONE)
    assert seen[1]["messages"][-1] == {"role": "user", "content": "\nC\n\nSteps Remaining: 99"}


@pytest.mark.parametrize(
    ("written", "sent", "told"),
    [
        (
            '{"command": "ls',
            {"invalid_arguments": '{"command": "ls'},
            {"role": "user", "content": "\nC\n\nSteps Remaining: 99"},
        ),
        (
            '"ls"',
            {"invalid_arguments": '"ls"'},
            {
                "role": "tool",
                "tool_call_id": "call_0_0",
                "content": "Exit code: 0\nExecution output of \\[execute_bash]:\n"
                "\nSteps Remaining: 99",
            },
        ),
        (
            "",
            {},
            {
                "role": "tool",
                "tool_call_id": "call_0_0",
                "content": "Error: No command provided.\nSteps Remaining: 99",
            },
        ),
    ],
)
async def test_arguments_that_no_backend_takes_back_are_sent_as_an_object(
    tmp_path: Path, written: str, sent: dict[str, Any], told: dict[str, Any]
) -> None:
    broken = tool_reply({"name": "execute_bash", "arguments": written})
    seen = await requests(tmp_path, broken, DONE)
    said, answered = seen[1]["messages"][-2:]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == sent
    assert answered == told


async def test_a_streaming_client_gets_the_same_history_and_the_answer(tmp_path: Path) -> None:
    replies = [{"reasoning": "Hm.", **tool_reply(call("nosuch"), content="I try.")}, DONE]
    whole = await requests(tmp_path / "whole", *replies)
    async with (
        scripted_backend(replies) as backend,
        house(
            backend, "memory", tmp_path / "streamed", profiles=Profiles.only(paper(WORDS))
        ) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        asked = {"model": "m", "messages": [USER], "stream": True}
        with anyio.fail_after(60):
            response = await client.post(f"{url}/v1/chat/completions", json=asked)
        streamed = [request.body["messages"] for request in backend.requests]
    assert streamed == [body["messages"] for body in whole]
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "42"


async def test_a_call_of_the_clients_tool_is_handed_over_and_its_answer_ends_in_the_steps_left(
    tmp_path: Path,
) -> None:
    mixed = tool_reply(call("lookup"), call("submit"))
    async with (
        scripted_backend([mixed, DONE]) as backend,
        house(backend, "memory", tmp_path, profiles=Profiles.only(paper(WORDS))) as url,
        httpx.AsyncClient(timeout=60, base_url=url) as client,
    ):
        asked = {"model": "m", "messages": [USER], "tools": [LOOKUP]}
        with anyio.fail_after(60):
            first = (await client.post("/v1/chat/completions", json=asked)).json()
            turn = first["choices"][0]["message"]
            (made,) = turn["tool_calls"]
            told = {"role": "tool", "tool_call_id": made["id"], "content": "forty-two"}
            asked["messages"] = [USER, {"role": "assistant", "tool_calls": [made]}, told]
            second = (await client.post("/v1/chat/completions", json=asked)).json()
        before, after = [request.body["messages"] for request in backend.requests]
    assert second["choices"][0]["message"]["content"] == "42"
    assert after[: len(before)] == before
    assert [message["role"] for message in after[len(before) :]] == ["assistant", "tool"]
    assert after[-1]["content"] == "forty-two\nSteps Remaining: 100"
