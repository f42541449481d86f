"""Every response and every event of its stream is what OpenAI's own description says it must be."""

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, Item, Raw, Refusal, chunk, frames, scripted_backend
from tests.fakes.server import ATTEMPTS, running_proxy
from tests.openapi.description import check, described

pytestmark = described
BODY = {"model": "fake-model", "input": "Hello."}
LOOKUP = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}
FREE_TEXT = {"type": "custom", "name": "lookup"}
SHELL = {"type": "shell", "environment": {"type": "container_auto"}}
CODE = {"type": "code_interpreter", "container": {"type": "auto"}}
NAMESPACE = {"type": "namespace", "name": "own", "description": "", "tools": [LOOKUP, FREE_TEXT]}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "x"}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
CALL = tool_reply(call("lookup", input="x"))
THINK = {**tool_reply(call("execute_bash", command="echo one; echo two >&2")), "reasoning": "Hm."}
MAKE = tool_reply(call("execute_bash", command="printf 'GIF89a;' > output/dot.gif"))
EDIT = tool_reply(call("str_replace_editor", command="view", path="/testbed"))
WRONG = tool_reply(call("execute_bash", cmd="ls"))
SUBMIT = tool_reply(call("submit", answer="See /testbed/output/dot.gif."))
STEPS: list[Item] = [THINK, MAKE, EDIT, WRONG, SUBMIT]
REFUSAL = {"message": {"role": "assistant", "content": None, "refusal": "No."}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
ALL_INCLUDED = {
    "include": [
        "code_interpreter_call.outputs",
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
    ]
}
RUNS: dict[str, tuple[list[Item], dict[str, Any]]] = {
    "prose": ([text_reply("Hello you.")], {}),
    "empty": ([text_reply("")] * 4, {}),
    "thinking": ([{"reasoning": "Hm.", "content": "42"}], {}),
    "steps": (STEPS, {}),
    "no steps": (STEPS, {"sandbox": {"steps": "off"}}),
    "steps as items": (STEPS, {"sandbox": {"steps": "items"}}),
    "steps as events": (STEPS, {"sandbox": {"steps": "events"}}),
    "shell": (STEPS, {"tools": [SHELL]}),
    "code interpreter": (STEPS, {"tools": [CODE]}),
    "all included": (STEPS, {"tools": [CODE], **ALL_INCLUDED}),
    "function": ([CALL], {"tools": [LOOKUP]}),
    "free text": ([CALL], {"tools": [FREE_TEXT]}),
    "namespace": ([tool_reply(call("own__lookup", input="x"))], {"tools": [NAMESPACE]}),
    "grammar": ([CALL], {"tools": [{**FREE_TEXT, "format": GRAMMAR}]}),
    "search": ([tool_reply(call("tool_search", query="x"))], {"tools": [SEARCH]}),
    "local shell": (
        [tool_reply(call("shell", commands=["ls"]))],
        {"tools": [{"type": "shell", "environment": {"type": "local"}}]},
    ),
    "older local shell": (
        [tool_reply(call("local_shell", command=["ls"]))],
        {"tools": [{"type": "local_shell"}]},
    ),
    "patch": ([tool_reply(call("apply_patch", path="x"))], {"tools": [{"type": "apply_patch"}]}),
    "left out": ([text_reply("42")], {"tools": [{"type": "web_search"}]}),
    "mixed": ([MAKE, CALL], {"tools": [SHELL, LOOKUP]}),
    "form": ([SUBMIT, text_reply('{"a": 1}')], FORM),
    "form not held": ([SUBMIT, text_reply("?"), text_reply("?")], FORM),
    "refusal": ([REFUSAL], {}),
    "cut short": ([SUBMIT, {"content": "4", "finish_reason": "length"}], {"stop": ["x"]}),
    "asked in full": (
        [text_reply("42")],
        {
            "instructions": "Be brief.",
            "max_output_tokens": 100,
            "max_tool_calls": 3,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
            "reasoning": {"effort": "low", "summary": "auto"},
            "safety_identifier": "s",
            "service_tier": "flex",
            "store": False,
            "temperature": 0.5,
            "text": {"verbosity": "low"},
            "tool_choice": "auto",
            "tools": [SHELL, CODE, LOOKUP, FREE_TEXT],
            "top_p": 0.9,
            "truncation": "auto",
            "user": "u",
        },
    ),
}
FAILURES: dict[str, list[Item]] = {
    "refused amid a step": [MAKE, Refusal(400, "no", code=400)],
    "broken": [Raw(200, b"<html>")] * ATTEMPTS,
    "broken amid a step": [MAKE, *[Raw(500, b"")] * ATTEMPTS],
}


async def answered(script: list[Item], body: dict[str, Any], tmp_path: Path) -> httpx.Response:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        with anyio.fail_after(30):
            return await client.post(f"{url}/v1/responses", json={**BODY, **body})


async def events(script: list[Item], body: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """The events of a stream, numbered and named as they say themselves."""
    text = (await answered(script, {**body, "stream": True}, tmp_path)).text
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        told_as = found[-1]["type"].replace("keepalive", "sandbox.step")
        assert name == f"event: {told_as}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def put_together(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client which reads the stream has in the end."""
    items: list[dict[str, Any]] = []
    for event in told:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif event["type"] == "response.output_item.done":
            assert items[event["output_index"]]["id"] == event["item"]["id"]
            items[event["output_index"]] = event["item"]
    return items


def pieces(told: list[dict[str, Any]], item: dict[str, Any], kind: str) -> str:
    """The text of an item as its deltas say it."""
    deltas = (event for event in told if event["type"] == f"response.{kind}.delta")
    return "".join(event["delta"] for event in deltas if event["item_id"] == item["id"])


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_a_whole_response_is_one(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    response = (await answered(script, body, tmp_path)).json()
    check("Response", response)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    for name, asked in body.items():
        if name not in ("tools", "sandbox", "include", "stop", "reasoning", "text"):
            assert response[name] == asked


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_every_event_of_a_stream_is_one_and_together_they_are_the_response(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    told = await events(script, body, tmp_path)
    for event in told:
        if event["type"] != "keepalive":
            check("ResponseStreamEvent", event)
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    response = told[-1]["response"]
    assert told[-1]["type"] == f"response.{response['status']}"
    assert put_together(told) == response["output"]
    for item in response["output"]:
        if item["type"] == "message" and item["content"][0]["type"] == "output_text":
            assert pieces(told, item, "output_text") == item["content"][0]["text"]
        elif item["type"] == "reasoning":
            assert pieces(told, item, "reasoning_summary_text") == item["summary"][0]["text"]
        elif item["type"] == "function_call":
            assert pieces(told, item, "function_call_arguments") == item["arguments"]


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES)
async def test_a_stream_that_fails_says_so_twice(script: list[Item], tmp_path: Path) -> None:
    told = await events(script, {"tools": [SHELL]}, tmp_path)
    for event in told:
        check("ResponseStreamEvent", event)
    error, failed = told[-2:]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert failed["response"]["error"]["message"] == error["message"] == error["error"]["message"]
    assert put_together(told) == failed["response"]["output"]
    assert all(item["status"] != "in_progress" for item in failed["response"]["output"])


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_with_the_text(stream: bool, tmp_path: Path) -> None:
    token = {"token": "42", "logprob": -0.1, "bytes": [52, 50], "top_logprobs": []}
    logprobs = {"content": [{**token, "bytes": None}]}
    if stream:
        last = chunk({"content": "42"}, logprobs=logprobs), chunk({}, "stop"), "[DONE]"
        item: Item = Frames(frames(*last))
    else:
        choice = {"index": 0, "finish_reason": "stop", "logprobs": logprobs}
        choice["message"] = {"role": "assistant", "content": "42"}
        body = json.dumps({"id": "x", "choices": [choice]}).encode()
        item = Raw(200, body, {"content-type": "application/json"})
    asked = {"include": ["message.output_text.logprobs"]}
    if stream:
        told = await events([SUBMIT, item], asked, tmp_path)
        deltas = [event for event in told if event["type"] == "response.output_text.delta"]
        assert [event["logprobs"] for event in deltas] == [[{**token, "bytes": []}]]
        response = told[-1]["response"]
    else:
        response = (await answered([SUBMIT, item], asked, tmp_path)).json()
    check("Response", response)
    assert response["output"][-1]["content"][0]["logprobs"] == [{**token, "bytes": []}]
