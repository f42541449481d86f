"""Agent handoffs of the Agents SDK: the call's result arrives with other instructions and other
tools.
"""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

NAME = "transfer_to_second"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
RESULT = '{"assistant": "Second"}'
FIRST, SECOND = "You are the first.", "You are the second."
FUNCTION = {"name": NAME, "parameters": SCHEMA}


def chat(first_answer: Any) -> list[dict[str, Any]]:
    user, made = {"role": "user", "content": "Hello."}, first_answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": RESULT}
    second = {"role": "system", "content": SECOND}
    return [{"messages": [second, user, made, result]}]


def responses(first_answer: Any) -> list[dict[str, Any]]:
    made = next(item for item in first_answer["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": RESULT}
    whole = {"input": [{"role": "user", "content": "Hello."}, made, result]}
    result_only = {"input": [result], "previous_response_id": first_answer["id"]}
    return [{"instructions": SECOND, **whole}, {"instructions": SECOND, **result_only}]


def messages(first_answer: Any) -> list[dict[str, Any]]:
    made = next(block for block in first_answer["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": RESULT}
    asked = {"role": "user", "content": "Hello."}
    answered = {"role": "assistant", "content": first_answer["content"]}
    conversation = [asked, answered, {"role": "user", "content": [result]}]
    return [{"system": SECOND, "max_tokens": 100, "messages": conversation}]


@pytest.mark.parametrize(
    ("path", "begin", "follow_ups"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": FIRST},
                    {"role": "user", "content": "Hello."},
                ],
                "tools": [{"type": "function", "function": FUNCTION}],
            },
            chat,
        ),
        (
            "/v1/responses",
            {
                "instructions": FIRST,
                "input": "Hello.",
                "tools": [{"type": "function", **FUNCTION}],
            },
            responses,
        ),
        (
            "/v1/messages",
            {
                "system": FIRST,
                "max_tokens": 100,
                "messages": [{"role": "user", "content": "Hello."}],
                "tools": [{"name": NAME, "input_schema": SCHEMA}],
            },
            messages,
        ),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_run_resumes_with_the_second_agents_instructions_after_a_handoff(
    path: str, begin: dict[str, Any], follow_ups: Any, tmp_path: Path
) -> None:
    handoff = tool_reply(call("execute_bash", command="echo kept > file"), call(NAME))
    looked = tool_reply(call("execute_bash", command="cat file"))
    script = [handoff, looked, text_reply("Second."), text_reply("Second.")]
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            first = await http.post(path, json={"model": "fake-model", **begin})
            for body in follow_ups(first.json()):
                answer = await http.post(path, json={"model": "fake-model", **body})
                assert "Second." in answer.text
    began, *went_on = [request.body["messages"] for request in backend.requests]
    assert FIRST in began[0]["content"]
    for conversation in went_on:
        assert SECOND in conversation[0]["content"]
        assert FIRST not in str(conversation)
        assert conversation[1 : len(began)] == began[1:]
    assert "kept" in went_on[1][-1]["content"]
