"""A backend as strict as OpenAI: it refuses what OpenAI's description of a request does not allow,
and its model works in the sandbox, calls the client's tools, and answers."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Item, Raw, Refusal
from tests.openapi.description import Tree

OURS = ("execute_bash", "str_replace_editor", "submit")
ANSWER = "{}"
"""Prose, and JSON as well."""
WORK = tool_reply(call("execute_bash", command="echo 42 > output/answer.csv"))
SUBMIT = tool_reply(call("submit", answer=ANSWER))
WHOLE = {
    "id": "chatcmpl-strict",
    "object": "chat.completion",
    "created": 0,
    "model": "strict",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        }
    ],
}


def strict(description: Tree) -> Callable[[dict[str, Any]], Item]:
    """What the backend answers to each request."""
    validator = jsonschema_rs.Draft202012Validator(
        {
            "$ref": "#/components/schemas/CreateChatCompletionRequest",
            "components": description["components"],
        },
        validate_formats=True,
    )

    def answer(body: dict[str, Any]) -> Item:
        try:
            fault = next(iter(validator.iter_errors(body)), None)
        except ValueError as error:  # half a surrogate pair, or too deep
            return _refusal(str(error))
        return _refusal(fault.message) if fault else _turn(body)

    return answer


def _refusal(message: str) -> Refusal:
    return Refusal(400, message, "invalid_request_error", code="invalid_value")


def _turn(body: dict[str, Any]) -> Item:
    names = [tool["function"]["name"] for tool in body.get("tools") or [] if "function" in tool]
    has_used_tools = body["messages"][-1]["role"] == "tool"
    if "execute_bash" in names and not has_used_tools:
        return WORK
    if "submit" in names:
        theirs = [name for name in names if name not in OURS]
        return tool_reply(call(theirs[0])) if theirs else SUBMIT
    if body.get("stream"):
        return text_reply(ANSWER)
    return Raw(200, json.dumps(WHOLE).encode(), {"content-type": "application/json"})
