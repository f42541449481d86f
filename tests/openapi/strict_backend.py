"""A backend that validates requests against OpenAI's description, works in the sandbox and calls
client tools.
"""

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Item, Raw, Refusal
from tests.openapi.description import Tree

SANDBOX_TOOLS = ("execute_bash", "str_replace_editor", "submit")
ANSWER = "{}"
"""An answer that is valid as prose and as JSON."""
WORK = tool_reply(call("execute_bash", command="echo 42 > output/answer.csv"))
SUBMIT = tool_reply(call("submit", answer=ANSWER))
COMPLETION = {
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
    """Return the script of the strict backend."""
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
        except ValueError as error:  # a lone surrogate, or nested too deeply
            return _refusal(str(error))
        return _refusal(fault.message) if fault else _turn(body)

    return answer


def _refusal(message: str) -> Refusal:
    return Refusal(400, message, "invalid_request_error", code="invalid_value")


def _turn(body: dict[str, Any]) -> Item:
    names = [tool["function"]["name"] for tool in body.get("tools") or [] if "function" in tool]
    has_run_a_tool = body["messages"][-1]["role"] == "tool"
    if "execute_bash" in names and not has_run_a_tool:
        return WORK
    if "submit" in names:
        client_tools = [name for name in names if name not in SANDBOX_TOOLS]
        return tool_reply(call(client_tools[0])) if client_tools else SUBMIT
    if body.get("stream"):
        return text_reply(ANSWER)
    return Raw(200, json.dumps(COMPLETION).encode(), {"content-type": "application/json"})
