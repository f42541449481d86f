"""The deprecated `functions`, told to the model as tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.sessions import function_call_id, states_between
from proxy.errors import BadRequestError
from proxy.wire.validation import not_together


def is_legacy(body: Mapping[str, Any]) -> bool:
    """Whether the client speaks of functions. Raises BadRequestError where it speaks of both."""
    if not body.get("functions"):
        return False
    if body.get("tools"):
        raise not_together(
            "'functions' is deprecated and cannot be used together with 'tools'.", "functions"
        )
    return True


def with_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls get ids, by which their results name them; a result alone stays as it is."""
    told: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for message, state in zip(messages, states_between(messages), strict=False):
        call, name = message.get("function_call"), message.get("name")
        role = message.get("role")
        if role == "assistant" and isinstance(call, dict):
            id = function_call_id(state, call.get("name"), call.get("arguments"))
            called[str(call.get("name"))] = id
            rest = {key: value for key, value in message.items() if key != "function_call"}
            told.append({**rest, "tool_calls": [{"id": id, "type": "function", "function": call}]})
        elif role == "function" and isinstance(name, str) and name in called:
            content = message.get("content")
            told.append({"role": "tool", "tool_call_id": called.pop(name), "content": content})
        else:
            told.append(message)
    return told


def _require(name: str, functions: Sequence[Mapping[str, Any]]) -> None:
    if all(function["name"] != name for function in functions):
        raise BadRequestError(
            f"Invalid value for 'function_call': no function named {name!r} was specified in the"
            " 'functions' parameter.",
            param="function_call.name",
        )


def as_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request in today's words. One call a turn: the answer has room for no second."""
    choice = body.get("function_call")
    if isinstance(choice, dict):
        _require(choice["name"], body["functions"])
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return {
        **body,
        "messages": with_ids(body["messages"]),
        "tools": [{"type": "function", "function": each} for each in body["functions"]],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
