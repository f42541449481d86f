"""The tools of a Responses request: functions for the chat completion, and the sandbox.

The client's own tools (functions, custom tools, namespaces) become functions. OpenAI's tools that
the client runs (shell, apply_patch, tool_search) become functions, too. Calls of OpenAI's tools are
returned as OpenAI's items. A hosted tool (shell, code interpreter) enables the sandbox.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.schemas.responses_parameters import UNAVAILABLE_TOOL_TYPES

Tool = Mapping[str, Any]
Item = Mapping[str, Any]

# OpenAI's tools that the client runs: shell, local_shell, apply_patch, tool_search

TOOL_SEARCH = "tool_search"
_USERS_COMPUTER = "the user's own computer, which is not the sandbox"
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}
_DIFF_DESCRIPTION = (
    "For create_file all lines of the file, each after a '+'. For update_file sections, each begun"
    " by a line '@@', or '@@ ' and a line that stands above the place, such as a function's head:"
    " in it lines that stay after a space, lines that go after a '-' and lines that come after a"
    " '+', with three lines that stay around each change. None for delete_file."
)
_OPERATIONS = ("create_file", "update_file", "delete_file")


def _function_schema(description: str, required: str, **properties: Tool) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    return {"description": description, "parameters": parameters}


_TOOLS: Mapping[str, Tool] = {
    "shell": _function_schema(
        f"Runs commands on {_USERS_COMPUTER}.",
        "commands",
        commands={**_STRINGS, "description": "Each is run by a shell of its own."},
        timeout_ms=_INTEGER,
        max_output_length=_INTEGER,
    ),
    "local_shell": _function_schema(
        f"Runs a program on {_USERS_COMPUTER}.",
        "command",
        command={**_STRINGS, "description": "The program and its arguments."},
        working_directory=_STRING,
        timeout_ms=_INTEGER,
        env={"type": "object", "additionalProperties": _STRING},
    ),
    "apply_patch": _function_schema(
        f"Creates, changes or deletes one file on {_USERS_COMPUTER}.",
        "type path",
        type={"type": "string", "enum": list(_OPERATIONS)},
        path=_STRING,
        diff={**_STRING, "description": _DIFF_DESCRIPTION},
    ),
    TOOL_SEARCH: _function_schema("Finds further tools.", ""),
}
ITEM_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "shell_call": "shc",
    "shell_call_output": "shco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
}
"""Prefixes of item ids by the item's type. The items of steps have other prefixes."""


def is_run_by_client(tool: Tool) -> bool:
    """Return True if the tool is one of OpenAI's tools that the client runs. A shell or a search
    may be hosted instead."""
    if tool["type"] == "shell":
        return (tool.get("environment") or {}).get("type") == "local"
    if tool["type"] == TOOL_SEARCH:
        return tool.get("execution") == "client"
    return tool["type"] in _TOOLS


def as_function(tool: Tool) -> Tool:
    """Return the tool with the name, description and parameters of a function."""
    present = {name: value for name, value in tool.items() if value is not None}
    return {**_TOOLS[tool["type"]], **present, "name": tool["type"]}


def call_fields(kind: str, arguments: str) -> dict[str, Any]:
    """Return the fields of a call item of OpenAI's tool `kind`. A field that the model omitted gets
    a default."""
    parsed = _parse_object(arguments)
    match kind:
        case "shell":
            action = {
                "commands": _text_list(parsed.get("commands")),
                "timeout_ms": _integer_or_none(parsed.get("timeout_ms")),
                "max_output_length": _integer_or_none(parsed.get("max_output_length")),
            }
            return {"action": action, "environment": {"type": "local"}}
        case "local_shell":
            return {"action": _local_shell_action(parsed)}
        case "apply_patch":
            return {"operation": _patch_operation(parsed)}
    return {"execution": "client", "arguments": parsed}


def call_arguments(item: Item) -> str:
    """Return, as JSON, the arguments in a call item of an OpenAI tool."""
    arguments = item.get("action") or item.get("operation") or item.get("arguments") or {}
    if isinstance(arguments, str):
        return arguments
    return json.dumps({name: value for name, value in arguments.items() if value is not None})


def result_text(item: Item) -> str:
    """Return a call's result as the text that the model sees."""
    output = item.get("output")
    if item["type"] == "apply_patch_call_output":
        return f"{item.get('status')}: {output}" if output else str(item.get("status"))
    return output if isinstance(output, str) else json.dumps(output)


def _local_shell_action(arguments: Item) -> dict[str, Any]:
    """Return the action of a local_shell call, without null fields, which the AI SDK refuses."""
    timeout_ms = _integer_or_none(arguments.get("timeout_ms"))
    directory = arguments.get("working_directory")
    return {
        "type": "exec",
        "command": _text_list(arguments.get("command")),
        "env": _environment_variables(arguments.get("env")),
        **({} if timeout_ms is None else {"timeout_ms": timeout_ms}),
        **({"working_directory": directory} if isinstance(directory, str) else {}),
    }


def _patch_operation(arguments: Item) -> dict[str, str]:
    kind = arguments.get("type") if arguments.get("type") in _OPERATIONS else "update_file"
    named = {"type": str(kind), "path": str(arguments.get("path") or "")}
    return named if kind == "delete_file" else {**named, "diff": str(arguments.get("diff") or "")}


def _parse_object(arguments: str) -> Mapping[str, Any]:
    """Return the JSON object that a model wrote, or an empty object for invalid JSON."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _text_list(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(each) for each in value]
    return [value] if isinstance(value, str) else []


def _integer_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _environment_variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: str(each) for name, each in value.items()}


# Tools as functions


def function_name(entry: Mapping[str, Any]) -> str:
    """Return the name of the function for a tool, a call or a choice."""
    name, namespace = entry.get("name"), entry.get("namespace")
    return f"{namespace}__{name}" if namespace else str(name)


def client_tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return the checked tools that the client runs, by the name of their function. Of several
    tools with one name, the last tool counts: a search may find a tool that the request already
    has."""
    return {function_name(tool): tool for entry in tools for tool in _client_tools_in(entry)}


def loaded_tools(items: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools that input items add to the tools of the request."""
    adding = ("additional_tools", f"{TOOL_SEARCH}_output")
    return [tool for item in items if item.get("type") in adding for tool in item["tools"]]


def chat_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as a tool of a chat completion."""
    named = {**tool, "name": function_name(tool)}
    if tool["type"] == "custom":
        custom = _present_fields(named, "name", "description")
        match tool.get("format"):
            case {"type": "grammar", **grammar}:
                # Chat completions have the grammar in an object of its own.
                custom["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": custom}
    function = _present_fields(named, "name", "description", "parameters", "strict")
    return {"type": "function", "function": function}


def _present_fields(tool: Tool, *names: str) -> dict[str, Any]:
    return {name: tool[name] for name in names if tool.get(name) is not None}


def tool_search_result(tools: Iterable[Tool]) -> str:
    """Return the text that tells the model which tools a search has found."""
    names = client_tools_by_name(tools)
    if not names:
        return "No tools were found."
    return "These tools can be called from now on: " + ", ".join(names)


def function_arguments(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call item of a function or custom tool as the model wrote them."""
    if call["type"] == "custom_tool_call":
        return json.dumps({"input": call["input"]})
    return str(call["arguments"])


def _client_tools_in(tool: Tool) -> Iterator[Tool]:
    """Yield the client's tools in an entry of `tools`: the entry itself, the tools of a namespace,
    or none for a hosted tool."""
    match tool["type"]:
        case "function" | "custom":
            yield tool
        case _ if is_run_by_client(tool):
            yield as_function(tool)
        case "namespace":
            about = f"{tool['description']}\n\n" if tool.get("description") else ""
            for each in tool["tools"]:
                description = f"{about}{each.get('description') or ''}".strip()
                yield {**each, "namespace": tool["name"], "description": description}
                about = ""  # only the first tool repeats the description of the namespace


# The tools of a request

HostedTool = Literal["shell", "code_interpreter"]


@dataclass(frozen=True, slots=True)
class ResponsesToolSet:
    """The tools of a request: the tools in its field `tools`, and the tools that its input items
    add (`additional_tools`, `tool_search_output`)."""

    functions: Sequence[Mapping[str, Any]] = ()
    """The client's tools as tools of a chat completion."""
    client_tools: Mapping[str, Tool] = field(default_factory=dict)
    """The client's tools as the request has them, by the name of their function."""
    step_item_tool: HostedTool | None = None
    """The hosted tool whose calls represent the steps in the output, or None."""
    has_hosted_tool: bool = False
    container_id: str | None = None
    files: Sequence[tuple[str, str]] = ()
    """Uploads to copy into the sandbox: the path in the request, and the file id."""
    network_policies: Sequence[tuple[str, str]] = ()
    """The path in the request and the type of each network policy."""
    unavailable_types: Sequence[str] = ()
    """The types of the request's tools that this server does not have."""


def read_tools(tools: Sequence[Tool], added_tools: Sequence[Tool] = ()) -> ResponsesToolSet:
    """Return the tool set of a request. `tools` are its checked tools, and `added_tools` are the
    tools that its input items add."""
    client_tools = client_tools_by_name([*tools, *added_tools])
    containers = [
        found for n, tool in enumerate(tools) if (found := _container_path_and_fields(tool, n))
    ]
    container_ids = [container.get("container_id") for _, container in containers]
    step_item_tools = map(_hosted_tool_for_steps, tools)
    types = {tool["type"] for tool in [*tools, *added_tools]}
    return ResponsesToolSet(
        functions=[chat_tool(tool) for tool in client_tools.values()],
        client_tools=client_tools,
        step_item_tool=next(filter(None, step_item_tools), None),
        has_hosted_tool=any(map(_is_hosted, tools)),
        container_id=next(filter(None, container_ids), None),
        files=[
            (f"{param}.file_ids[{n}]", file_id)
            for param, container in containers
            for n, file_id in enumerate(container.get("file_ids") or [])
        ],
        network_policies=[
            (f"{param}.network_policy", container["network_policy"]["type"])
            for param, container in containers
            if container.get("network_policy")
        ],
        unavailable_types=sorted(types.intersection(UNAVAILABLE_TOOL_TYPES)),
    )


def starts_with_tool(choice: Any, tools: ResponsesToolSet) -> bool:
    """Return True if the run must begin with a tool call. A call of a sandbox tool counts too."""
    match choice:
        case {"type": "shell" | "code_interpreter" as kind}:
            return not _is_client_tool(kind, tools)
    return choice == "required" and tools.has_hosted_tool


def chat_choice(choice: Any, tools: ResponsesToolSet) -> Any:
    """Return the `tool_choice` of the chat completion. It is None if `starts_with_tool` is true: a
    call of a sandbox tool then satisfies the choice too."""
    if starts_with_tool(choice, tools):
        return None
    match choice:
        case {"type": "function" | "custom"}:
            return _function_choice(choice)
        case {"type": "shell" | "local_shell" | "apply_patch" as kind}:
            return _function_choice({"name": kind})
        case {"type": "allowed_tools"}:
            return _allowed_tools(choice, tools)
    return choice


def _allowed_tools(choice: Tool, tools: ResponsesToolSet) -> Any:
    """Convert an `allowed_tools` choice of the Responses API to one of chat completions. Hosted
    tools are left out of the list, because the sandbox tools are always allowed. If an entry names
    no client tool, the mode is `auto`."""
    entries = [_functions_of(entry, tools) for entry in choice.get("tools") or []]
    mode = choice.get("mode") or "auto" if all(entries) else "auto"  # an empty list: a hosted tool
    allowed = {"mode": mode, "tools": [function for entry in entries for function in entry]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _functions_of(entry: Tool, tools: ResponsesToolSet) -> list[dict[str, Any]]:
    """Return the functions that an entry of the allowed tools names: one function, all functions of
    a namespace, or an empty list for a hosted tool."""
    match entry:
        case {"type": "function" | "custom"}:
            return [_function_choice(entry)]
        case {"type": "namespace", "name": namespace}:
            client_tools = tools.client_tools.values()
            within = (tool for tool in client_tools if tool.get("namespace") == namespace)
            return list(map(_function_choice, within))
        case {"type": str(kind)} if _is_client_tool(kind, tools):
            return [_function_choice({"name": kind})]
    return []


def _is_client_tool(kind: str, tools: ResponsesToolSet) -> bool:
    """Return True if the request has a tool of the type `kind` that the client runs."""
    return kind in tools.client_tools and tools.client_tools[kind]["type"] == kind


def _function_choice(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function_name(tool)}}


def _container_path_and_fields(
    tool: Mapping[str, Any], index: int
) -> tuple[str, Mapping[str, Any]] | None:
    """Return the path in the request and the fields of the container that a tool describes, or
    None."""
    match tool:
        case {"type": "shell", "environment": dict(environment)}:
            return f"tools[{index}].environment", environment
        case {"type": "code_interpreter", "container": str(id)}:
            return f"tools[{index}].container", {"container_id": id}
        case {"type": "code_interpreter", "container": dict(container)}:
            return f"tools[{index}].container", container
    return None


def _is_hosted(tool: Tool) -> bool:
    return tool["type"] in ("shell", "code_interpreter") and not is_run_by_client(tool)


def _hosted_tool_for_steps(tool: Mapping[str, Any]) -> HostedTool | None:
    """Return the hosted tool if its calls may represent steps in the output, else None. A shell
    without an environment does not count: clients that send one would run the calls themselves."""
    if tool["type"] == "code_interpreter":
        return "code_interpreter"
    return "shell" if _is_hosted(tool) and tool.get("environment") else None
