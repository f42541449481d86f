"""Responses and their stream events, validated against OpenAI's own description."""

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
LOOKUP_CALL = tool_reply(call("lookup", input="x"))
REASONED_ECHO = {
    **tool_reply(call("execute_bash", command="echo one; echo two >&2")),
    "reasoning": "Hm.",
}
MAKE = tool_reply(call("execute_bash", command="printf 'GIF89a;' > output/dot.gif"))
EDIT = tool_reply(call("str_replace_editor", command="view", path="/testbed"))
WRONG = tool_reply(call("execute_bash", cmd="ls"))
SUBMIT = tool_reply(call("submit", answer="See /testbed/output/dot.gif."))
STEPS: list[Item] = [REASONED_ECHO, MAKE, EDIT, WRONG, SUBMIT]
REFUSAL = {"message": {"role": "assistant", "content": None, "refusal": "No."}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA_FORMAT = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
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
    "function": ([LOOKUP_CALL], {"tools": [LOOKUP]}),
    "free text": ([LOOKUP_CALL], {"tools": [FREE_TEXT]}),
    "namespace": ([tool_reply(call("own__lookup", input="x"))], {"tools": [NAMESPACE]}),
    "grammar": ([LOOKUP_CALL], {"tools": [{**FREE_TEXT, "format": GRAMMAR}]}),
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
    "mixed": ([MAKE, LOOKUP_CALL], {"tools": [SHELL, LOOKUP]}),
    "form": ([SUBMIT, text_reply('{"a": 1}')], JSON_SCHEMA_FORMAT),
    "form not held": ([SUBMIT, text_reply("?"), text_reply("?")], JSON_SCHEMA_FORMAT),
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


async def post(script: list[Item], body: dict[str, Any], tmp_path: Path) -> httpx.Response:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        with anyio.fail_after(30):
            return await client.post(f"{url}/v1/responses", json={**BODY, **body})


async def events(script: list[Item], body: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names and sequence numbers must be consistent."""
    text = (await post(script, {**body, "stream": True}, tmp_path)).text
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        event_name = found[-1]["type"].replace("keepalive", "sandbox.step")
        assert name == f"event: {event_name}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def assembled_items(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output items that a client assembles from the stream."""
    items: list[dict[str, Any]] = []
    for event in stream:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif event["type"] == "response.output_item.done":
            assert items[event["output_index"]]["id"] == event["item"]["id"]
            items[event["output_index"]] = event["item"]
    return items


def joined_deltas(stream: list[dict[str, Any]], item: dict[str, Any], kind: str) -> str:
    """Return the text of an item as the concatenation of its deltas."""
    deltas = (event for event in stream if event["type"] == f"response.{kind}.delta")
    return "".join(event["delta"] for event in deltas if event["item_id"] == item["id"])


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_response_matches_the_openai_schema(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    response = (await post(script, body, tmp_path)).json()
    check("Response", response)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    for name, value in body.items():
        if name not in ("tools", "sandbox", "include", "stop", "reasoning", "text"):
            assert response[name] == value


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_stream_events_match_the_schema_and_add_up_to_the_response(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    stream = await events(script, body, tmp_path)
    for event in stream:
        if event["type"] != "keepalive":
            check("ResponseStreamEvent", event)
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    response = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{response['status']}"
    assert assembled_items(stream) == response["output"]
    for item in response["output"]:
        if item["type"] == "message" and item["content"][0]["type"] == "output_text":
            assert joined_deltas(stream, item, "output_text") == item["content"][0]["text"]
        elif item["type"] == "reasoning":
            assert (
                joined_deltas(stream, item, "reasoning_summary_text") == item["summary"][0]["text"]
            )
        elif item["type"] == "function_call":
            assert joined_deltas(stream, item, "function_call_arguments") == item["arguments"]


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES)
async def test_failed_stream_ends_with_the_events_error_and_response_failed(
    script: list[Item], tmp_path: Path
) -> None:
    stream = await events(script, {"tools": [SHELL]}, tmp_path)
    for event in stream:
        check("ResponseStreamEvent", event)
    error, failed = stream[-2:]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert failed["response"]["error"]["message"] == error["message"] == error["error"]["message"]
    assert assembled_items(stream) == failed["response"]["output"]
    assert all(item["status"] != "in_progress" for item in failed["response"]["output"])


@pytest.mark.parametrize("stream", [False, True])
async def test_text_part_and_its_deltas_contain_the_log_probabilities(
    stream: bool, tmp_path: Path
) -> None:
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
    value = {"include": ["message.output_text.logprobs"]}
    if stream:
        sent = await events([SUBMIT, item], value, tmp_path)
        deltas = [event for event in sent if event["type"] == "response.output_text.delta"]
        assert [event["logprobs"] for event in deltas] == [[{**token, "bytes": []}]]
        response = sent[-1]["response"]
    else:
        response = (await post([SUBMIT, item], value, tmp_path)).json()
    check("Response", response)
    assert response["output"][-1]["content"][0]["logprobs"] == [{**token, "bytes": []}]
