"""Tools that take free text, OpenAI's `custom`: functions with one argument to the model."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _as_function(custom: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, given as what OpenAI says of it, as the model is told of it."""
    told = {"name": custom["name"], "description": _description(custom)}
    given = {name: word for name, word in told.items() if word is not None}
    return {"type": "function", "function": {**given, "parameters": PARAMETERS}}


def names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Those of the tools that take free text."""
    return frozenset(tool["custom"]["name"] for tool in tools if _is_custom(tool))


def as_functions(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request with functions in their place, in its history too."""
    return {
        **body,
        "messages": [_told(message) for message in body["messages"]],
        "tools": [
            _as_function(tool["custom"]) if _is_custom(tool) else tool
            for tool in body.get("tools") or []
        ],
        "tool_choice": _choice(body.get("tool_choice")),
    }


def _description(custom: Mapping[str, Any]) -> str | None:
    """With the grammar, which nobody here holds the model to."""
    match custom.get("format"):
        case {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}:
            grammar = f"Its input must be as this grammar says ({syntax}):\n{definition}"
            return f"{custom.get('description') or ''}\n\n{grammar}".strip()
    return custom.get("description")


def _told(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(map(_is_custom, calls)):
        return message
    return {**message, "tool_calls": [_call(call) if _is_custom(call) else call for call in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    made = call["custom"]
    function = {"name": made["name"], "arguments": json.dumps({"input": made["input"]})}
    return {"id": call.get("id"), "type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """Of one tool, or of some."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return _named(choice)
    allowed = choice["allowed_tools"]
    tools = [_named(tool) for tool in allowed["tools"]]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def _named(tool: Any) -> Any:
    return {"type": "function", "function": tool["custom"]} if _is_custom(tool) else tool


def _is_custom(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("type") == "custom"
        and isinstance(value.get("custom"), dict)
    )
