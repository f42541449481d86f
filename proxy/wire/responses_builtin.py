"""OpenAI's own tools that the client runs, each a function of the chat below: the shell of its
computer, patches to its files, a search for further tools."""

import json
from collections.abc import Mapping
from typing import Any

Tool = Mapping[str, Any]
Item = Mapping[str, Any]
SEARCH = "tool_search"
_ELSEWHERE = "the user's own computer, which is not the sandbox"
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}
_DIFF = (
    "For create_file all lines of the file, each after a '+'. For update_file sections, each begun"
    " by a line '@@', or '@@ ' and a line that stands above the place, such as a function's head:"
    " in it lines that stay after a space, lines that go after a '-' and lines that come after a"
    " '+', with three lines that stay around each change. None for delete_file."
)
_OPERATIONS = ("create_file", "update_file", "delete_file")


def _described(words: str, required: str, **properties: Tool) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    return {"description": words, "parameters": parameters}


_TOOLS: Mapping[str, Tool] = {
    "shell": _described(
        f"Runs commands on {_ELSEWHERE}.",
        "commands",
        commands={**_STRINGS, "description": "Each is run by a shell of its own."},
        timeout_ms=_INTEGER,
        max_output_length=_INTEGER,
    ),
    "local_shell": _described(
        f"Runs a program on {_ELSEWHERE}.",
        "command",
        command={**_STRINGS, "description": "The program and its arguments."},
        working_directory=_STRING,
        timeout_ms=_INTEGER,
        env={"type": "object", "additionalProperties": _STRING},
    ),
    "apply_patch": _described(
        f"Creates, changes or deletes one file on {_ELSEWHERE}.",
        "type path",
        type={"type": "string", "enum": list(_OPERATIONS)},
        path=_STRING,
        diff={**_STRING, "description": _DIFF},
    ),
    SEARCH: _described("Finds further tools.", ""),
}
PREFIXES: Mapping[str, str] = {
    "shell": "shc",
    "local_shell": "lsh",
    "apply_patch": "apc",
    SEARCH: "tsc",
}
"""How the ids of their calls begin; not as those of our steps, which need not be found again."""


def run_by_client(tool: Tool) -> bool:
    """Whether a tool is one of them: a shell, or a search, may be the server's as well."""
    if tool["type"] == "shell":
        return (tool.get("environment") or {}).get("type") == "local"
    if tool["type"] == SEARCH:
        return tool.get("execution") == "client"
    return tool["type"] in _TOOLS


def described(tool: Tool) -> Tool:
    """The tool with a name, and all that a function has."""
    asked = {name: value for name, value in tool.items() if value is not None}
    return {**_TOOLS[tool["type"]], **asked, "name": tool["type"]}


def call_fields(kind: str, arguments: str) -> dict[str, Any]:
    """What the call of one says beside its ids; what the model left out has to be there."""
    given = _read(arguments)
    match kind:
        case "shell":
            limits = {name: _whole(given.get(name)) for name in ("timeout_ms", "max_output_length")}
            action = {"commands": _texts(given.get("commands")), **limits}
            return {"action": action, "environment": {"type": "local"}}
        case "local_shell":
            return {"action": _program(given)}
        case "apply_patch":
            return {"operation": _operation(given)}
    return {"execution": "client", "arguments": given}


def call_arguments(item: Item) -> str:
    """What the model wrote in a call that comes back."""
    given = item.get("action") or item.get("operation") or item.get("arguments") or {}
    if isinstance(given, str):
        return given
    return json.dumps({name: value for name, value in given.items() if value is not None})


def result_text(item: Item) -> str:
    """What came of a call, as the model is told of it."""
    output = item.get("output")
    if item["type"] == "apply_patch_call_output":
        return f"{item.get('status')}: {output}" if output else str(item.get("status"))
    return output if isinstance(output, str) else json.dumps(output)


def _program(given: Item) -> dict[str, Any]:
    """No null where nothing was said: the AI SDK refuses one here."""
    timeout_ms, place = _whole(given.get("timeout_ms")), given.get("working_directory")
    return {
        "type": "exec",
        "command": _texts(given.get("command")),
        "env": _variables(given.get("env")),
        **({} if timeout_ms is None else {"timeout_ms": timeout_ms}),
        **({"working_directory": place} if isinstance(place, str) else {}),
    }


def _operation(given: Item) -> dict[str, str]:
    kind = given.get("type") if given.get("type") in _OPERATIONS else "update_file"
    named = {"type": str(kind), "path": str(given.get("path") or "")}
    return named if kind == "delete_file" else {**named, "diff": str(given.get("diff") or "")}


def _read(arguments: str) -> Mapping[str, Any]:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(each) for each in value]
    return [value] if isinstance(value, str) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: str(each) for name, each in value.items()}
