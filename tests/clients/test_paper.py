"""The `paper` profile: client parameters, message layout, and how its runs end."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.paper_prompts import ReferencePrompts
from policies.profile import Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import Held, Item, Refusal, ScriptedBackend, scripted_backend
from tests.fakes.paper import paper, unstreamed
from tests.fakes.server import Kind, running_proxy
from tests.fakes.small_window import SmallWindow

WORDS = ReferencePrompts(system="Work.", instance="<{problem_statement}>", no_call="\nC\n")
USER = {"role": "user", "content": "6*7?"}
DONE = tool_reply(call("submit", answer="42"))
LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}},
}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@asynccontextmanager
async def served(
    tmp_path: Path,
    script: Any,
    profile: Profile,
    window: int | None = None,
    kind: Kind = "memory",
) -> AsyncIterator[tuple[ScriptedBackend, httpx.AsyncClient]]:
    """Serve the script under the profile and yield the backend and an HTTP client."""
    with anyio.fail_after(60):
        async with (
            scripted_backend(script, window=window) as backend,
            running_proxy(backend, kind, tmp_path, profiles=Profiles.only(profile)) as url,
            httpx.AsyncClient(timeout=60, base_url=url) as client,
        ):
            yield backend, client


async def complete(client: httpx.AsyncClient, *messages: Any) -> tuple[str, str, str]:
    """Return the answer, its finish reason and the run's stop reason."""
    params = {"model": "m", "messages": [*messages, USER]}
    body = (await client.post("/v1/chat/completions", json=params)).json()
    (choice,) = body["choices"]
    return choice["message"]["content"], choice["finish_reason"], body["sandbox"]["stop_reason"]


def paper_with_limits(**limits: Any) -> Profile:
    """Return the paper profile with changed limits."""
    profile = paper(WORDS)
    return replace(profile, limits=replace(profile.limits, **limits))


async def backend_requests(tmp_path: Path, *replies: Item, **body: Any) -> list[dict[str, Any]]:
    """Return the backend requests for one request, whose answer must be 42."""
    async with (
        scripted_backend(replies) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(paper(WORDS))) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        with anyio.fail_after(60):
            params = {"model": "m", "messages": [USER], **body}
            response = await client.post(f"{url}/v1/chat/completions", json=params)
        assert response.json()["choices"][0]["message"]["content"] == "42", response.text
        return [unstreamed(request.body) for request in backend.requests]


def parameters(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("messages", "tools")}


@pytest.mark.parametrize(
    ("params", "sent"),
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
async def test_client_parameters_override_reference_defaults_at_each_turn(
    tmp_path: Path, params: dict[str, Any], sent: dict[str, Any]
) -> None:
    seen = await backend_requests(tmp_path, text_reply("Hm."), DONE, **params)
    assert [parameters(body) for body in seen] == [{"model": "m", **sent}] * 2


async def test_max_tokens_is_dropped_after_a_context_error(
    tmp_path: Path,
) -> None:
    full = Refusal(400, "This model's maximum context length is 32768 tokens.")
    seen = await backend_requests(tmp_path, full, text_reply("Hm."), DONE)
    assert [body.get("max_tokens") for body in seen] == [65_536, None, None]
    assert seen[0]["messages"] == seen[1]["messages"]


async def test_last_user_message_is_the_problem_statement(
    tmp_path: Path,
) -> None:
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
    ]
    (body,) = await backend_requests(tmp_path, DONE, messages=[*before, USER])
    assert body["messages"] == [
        {"role": "system", "content": "Work.\n\nBe brief."},
        *before[1:],
        {"role": "user", "content": "<6*7?>\nSteps Remaining: 100"},
    ]


async def test_prompt_setting_is_ignored_in_the_paper_profile(tmp_path: Path) -> None:
    (body,) = await backend_requests(tmp_path, DONE, sandbox={"prompt": "compute_first"})
    assert body["messages"][0] == {"role": "system", "content": "Work."}


async def test_images_follow_the_problem_statement(tmp_path: Path) -> None:
    parts = [PICTURE, {"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    (body,) = await backend_requests(tmp_path, DONE, messages=[{"role": "user", "content": parts}])
    text, picture, steps = body["messages"][-1]["content"]
    assert text["text"].startswith("<")
    assert "What is it?" in text["text"]
    assert text["text"].endswith(
        ">\n\n[Given file: /testbed/documents/image-1.png (image/png, 2 bytes)]"
    )
    assert picture == PICTURE
    assert steps == {"type": "text", "text": "\nSteps Remaining: 100"}


async def test_tool_call_written_as_text_is_not_a_call(tmp_path: Path) -> None:
    written = '<tool_call>{"name": "submit", "arguments": {"answer": "41"}}</tool_call>'
    seen = await backend_requests(tmp_path, text_reply(written), DONE)
    assert seen[1]["messages"][-1] == {"role": "user", "content": "\nC\n\nSteps Remaining: 99"}


@pytest.mark.parametrize(
    ("written", "sent", "expected"),
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
async def test_invalid_tool_arguments_are_sent_back_to_the_model_as_an_object(
    tmp_path: Path, written: str, sent: dict[str, Any], expected: dict[str, Any]
) -> None:
    broken = tool_reply({"name": "execute_bash", "arguments": written})
    seen = await backend_requests(tmp_path, broken, DONE)
    said, answered = seen[1]["messages"][-2:]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == sent
    assert answered == expected


async def test_streamed_paper_run_has_the_history_and_answer_of_an_unstreamed_run(
    tmp_path: Path,
) -> None:
    replies = [{"reasoning": "Hm.", **tool_reply(call("nosuch"), content="I try.")}, DONE]
    whole = await backend_requests(tmp_path / "whole", *replies)
    async with (
        scripted_backend(replies) as backend,
        running_proxy(
            backend, "memory", tmp_path / "streamed", profiles=Profiles.only(paper(WORDS))
        ) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        params = {"model": "m", "messages": [USER], "stream": True}
        with anyio.fail_after(60):
            response = await client.post(f"{url}/v1/chat/completions", json=params)
        streamed = [request.body["messages"] for request in backend.requests]
    assert streamed == [body["messages"] for body in whole]
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "42"


async def test_remaining_step_count_is_appended_to_a_client_tool_result(
    tmp_path: Path,
) -> None:
    mixed = tool_reply(call("lookup"), call("submit"))
    async with (
        scripted_backend([mixed, DONE]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(paper(WORDS))) as url,
        httpx.AsyncClient(timeout=60, base_url=url) as client,
    ):
        params = {"model": "m", "messages": [USER], "tools": [LOOKUP]}
        with anyio.fail_after(60):
            first = (await client.post("/v1/chat/completions", json=params)).json()
            turn = first["choices"][0]["message"]
            (made,) = turn["tool_calls"]
            result = {"role": "tool", "tool_call_id": made["id"], "content": "forty-two"}
            params["messages"] = [USER, {"role": "assistant", "tool_calls": [made]}, result]
            second = (await client.post("/v1/chat/completions", json=params)).json()
        before, after = [request.body["messages"] for request in backend.requests]
    assert second["choices"][0]["message"]["content"] == "42"
    assert after[: len(before)] == before
    assert [message["role"] for message in after[len(before) :]] == ["assistant", "tool"]
    assert after[-1]["content"] == "forty-two\nSteps Remaining: 100"


def prose_turns(count: int, tokens: int = 0) -> list[Item]:
    """Return turns without a tool call, each of which adds `tokens` to the trajectory."""
    usages = ({"prompt_tokens": n * tokens, "completion_tokens": tokens} for n in range(count))
    return [{**text_reply("It is 41."), "usage": usage if tokens else None} for usage in usages]


async def test_run_at_its_turn_limit_sends_no_final_question_and_does_not_take_text_as_its_answer(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, prose_turns(3), paper_with_limits(max_turns=3)) as (
        backend,
        client,
    ):
        assert await complete(client) == ("", "length", "max_turns")
    assert len(backend.requests) == 3


async def test_answer_file_is_the_answer_if_the_turn_limit_ends_the_run(tmp_path: Path) -> None:
    write = tool_reply(call("execute_bash", command="printf 42 > output/answer.txt"))
    async with served(tmp_path, [write], paper_with_limits(max_turns=1)) as (backend, client):
        assert await complete(client) == ("42", "stop", "max_turns")
    assert len(backend.requests) == 1


async def test_submit_without_an_answer_file_is_an_empty_answer(tmp_path: Path) -> None:
    script = [*prose_turns(1), tool_reply(call("submit"))]
    async with served(tmp_path, script, paper(WORDS)) as (backend, client):
        said, _, stop = await complete(client)
    assert (said, stop) == ("", "submitted")
    assert len(backend.requests) == 2


async def test_final_question_can_be_enabled_in_the_paper_profile(tmp_path: Path) -> None:
    script = [*prose_turns(1), text_reply("42")]
    profile = paper_with_limits(max_turns=1, final_question=True)
    async with served(tmp_path, script, profile) as (backend, client):
        assert await complete(client) == ("42", "stop", "max_turns")
    assert "tools" not in backend.requests[1].body


async def test_trajectory_token_limit_ends_the_run(tmp_path: Path) -> None:
    script = prose_turns(100, tokens=10_000)
    async with served(tmp_path, script, paper(WORDS)) as (backend, client):
        assert await complete(client) == ("", "length", "trajectory_tokens")
    assert len(backend.requests) == 7  # 65,536 tokens
    async with served(
        tmp_path / "long", script, paper_with_limits(max_trajectory_tokens=131_072)
    ) as (
        backend,
        client,
    ):
        assert await complete(client) == ("", "length", "trajectory_tokens")
    assert len(backend.requests) == 14


async def test_long_observation_that_was_not_yet_sent_counts_toward_the_trajectory_limit(
    tmp_path: Path,
) -> None:
    """The reference's guard ends a run whose last observation is one very long line."""
    script = [tool_reply(call("execute_bash", command="printf 'x%.0s' $(seq 400000)"))]
    async with served(tmp_path, script, paper(WORDS), kind="bubblewrap") as (backend, client):
        assert await complete(client) == ("", "length", "trajectory_tokens")
    assert len(backend.requests) == 1


async def test_request_over_the_trajectory_limit_is_not_sent(tmp_path: Path) -> None:
    long = {"role": "user", "content": "word " * 100_000}
    async with served(tmp_path, [], paper(WORDS)) as (backend, client):
        assert await complete(client, long) == ("", "length", "trajectory_tokens")
    assert not backend.requests


async def test_full_context_ends_the_run_without_compaction(tmp_path: Path) -> None:
    def print_more(body: dict[str, Any]) -> dict[str, Any]:
        return tool_reply(call("execute_bash", command="seq 1000 1080"))

    script = SmallWindow(print_more, window=2048)
    async with served(tmp_path, script, paper(WORDS), window=2048) as (_, client):
        assert await complete(client) == ("", "length", "context_window")
    histories = [body["messages"] for body in script.bodies]
    assert len(histories) > 3
    for shorter, longer in pairwise(histories):
        assert longer[: len(shorter)] == shorter


async def test_silent_backend_times_out_after_the_model_timeout_of_the_profile(
    tmp_path: Path,
) -> None:
    held = Held(DONE, until=asyncio.Event())
    async with served(tmp_path, [held] * 3, paper_with_limits(model_timeout_s=0.05)) as (_, client):
        params = {"model": "m", "messages": [USER]}
        response = await client.post("/v1/chat/completions", json=params)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "backend_timeout")


def file_part(name: str, data: bytes) -> dict[str, Any]:
    url = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


NOTE = "[Given file: /testbed/documents/a.csv (text/csv, 2 bytes)]"
FAULT = "[https://x.example/b.csv was not fetched: URLs are not fetched here]"


@pytest.mark.parametrize(
    ("content", "sent"),
    [
        (
            [{"type": "text", "text": "6*7?"}, file_part("a.csv", b"42")],
            f"<6*7?>\n\n{NOTE}\nSteps Remaining: 100",
        ),
        (
            [file_part("a.csv", b"42"), {"type": "text", "text": "6*7?"}],
            f"<6*7?>\n\n{NOTE}\nSteps Remaining: 100",
        ),
        (
            [
                {"type": "text", "text": "6*7?"},
                file_part("a.csv", b"42"),
                {"type": "file", "file": {"file_data": "https://x.example/b.csv"}},
            ],
            f"<6*7?>\n\n{NOTE}\n{FAULT}\nSteps Remaining: 100",
        ),
        ([{"type": "text", "text": "6*7?"}], "<6*7?>\nSteps Remaining: 100"),
    ],
)
async def test_input_file_note_follows_the_problem(tmp_path: Path, content: Any, sent: str) -> None:
    (body,) = await backend_requests(
        tmp_path, DONE, messages=[{"role": "user", "content": content}]
    )
    assert body["messages"][-1] == {"role": "user", "content": sent}


async def test_note_of_a_file_given_by_id_follows_the_first_user_message(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, [DONE, DONE], paper(WORDS)) as (backend, client):
        file = {"file": ("a.csv", b"42", "text/csv")}
        form = {"purpose": "user_data"}
        file_id = (await client.post("/v1/files", files=file, data=form)).json()["id"]
        params = {"model": "m", "messages": [USER], "sandbox": {"file_ids": [file_id]}}
        answered = (await client.post("/v1/chat/completions", json=params)).json()
        hello = {"role": "user", "content": "Hello."}
        params["messages"] = [hello, {"role": "assistant", "content": "Hello!"}, USER]
        await client.post("/v1/chat/completions", json=params)
        only_turn, later = [request.body["messages"][1:] for request in backend.requests]
    assert answered["choices"][0]["message"]["content"] == "42"
    assert only_turn[-1]["content"] == f"<6*7?>\n\n{NOTE}\nSteps Remaining: 100"
    assert later[0]["content"] == f"Hello.\n\n{NOTE}"
    assert later[-1]["content"] == "<6*7?>\nSteps Remaining: 100"


async def test_file_note_follows_the_tool_result(tmp_path: Path) -> None:
    async with served(tmp_path, [tool_reply(call("lookup")), DONE], paper(WORDS)) as (
        backend,
        client,
    ):
        params = {"model": "m", "messages": [USER], "tools": [LOOKUP]}
        first = (await client.post("/v1/chat/completions", json=params)).json()
        (made,) = first["choices"][0]["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "forty-two"}
        more = {"role": "user", "content": [file_part("a.csv", b"42")]}
        params["messages"] = [USER, {"role": "assistant", "tool_calls": [made]}, result, more]
        await client.post("/v1/chat/completions", json=params)
        (last,) = backend.requests[1].body["messages"][-1:]
    assert [part["text"] for part in last["content"]] == [NOTE, "\nSteps Remaining: 100"]


async def test_repetitive_reply_of_a_paper_run_is_kept_unchanged(tmp_path: Path) -> None:
    words = replace(WORDS, system="You have a computer, and you may use it for all that you like.")
    thinking = "So it goes on. " * 500
    quoting = tool_reply(call("execute_bash", command="echo 1")) | {
        "content": f"{words.system} {thinking}",
        "reasoning": thinking,
    }
    async with served(tmp_path, [quoting, DONE], paper(words)) as (backend, client):
        assert (await complete(client))[2] == "submitted"
    messages = backend.requests[1].body["messages"]
    assert messages[-2]["content"] == quoting["content"]
    assert messages[-1]["role"] == "tool"
