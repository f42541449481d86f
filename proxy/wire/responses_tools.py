"""The tools of /v1/responses: functions for the chat below, and which computer was asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.wire.responses_builtin import Tool, run_by_client
from proxy.wire.responses_functions import function_name, in_chat, own_tools
from proxy.wire.responses_shapes import LEFT_OUT

HostedTool = Literal["shell", "code_interpreter"]


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What `tools` comes to."""

    functions: Sequence[Mapping[str, Any]] = ()
    """The client's own, as chat completions have them."""
    own: Mapping[str, Tool] = field(default_factory=dict)
    """The same as the client has them, by what the model calls them."""
    shows: HostedTool | None = None
    """The hosted tool under whose name steps may be shown."""
    has_computer: bool = False
    """Whether a hosted tool was asked for."""
    container_id: str | None = None
    files: Sequence[tuple[str, str]] = ()
    """Uploads that the computer begins with, and where in the request each is named."""
    networks: Sequence[tuple[str, str]] = ()
    """What was said of the network, and where."""
    left_out: Sequence[str] = ()
    """The kinds of those that there are not."""


def asked_tools(tools: Sequence[Tool], more: Sequence[Tool] = ()) -> AskedTools:
    """Read them, and those of the client's own that the input brings; their shapes are right."""
    own = own_tools([*tools, *more])
    containers = [found for n, tool in enumerate(tools) if (found := _container(tool, n))]
    shown = [_shown_as(tool) for tool in tools]
    return AskedTools(
        functions=[in_chat(tool) for tool in own.values()],
        own=own,
        shows=next((name for name in shown if name), None),
        has_computer=any(map(_is_computer, tools)),
        container_id=next((id for _, at in containers if (id := at.get("container_id"))), None),
        files=[
            (f"{param}.file_ids[{n}]", file_id)
            for param, at in containers
            for n, file_id in enumerate(at.get("file_ids") or [])
        ],
        networks=[
            (f"{param}.network_policy", at["network_policy"]["type"])
            for param, at in containers
            if at.get("network_policy")
        ],
        left_out=sorted({tool["type"] for tool in [*tools, *more]}.intersection(LEFT_OUT)),
    )


def tool_first(choice: Any, tools: AskedTools) -> bool:
    """Whether the run is to begin with a tool, be it the computer."""
    match choice:
        case {"type": "shell" | "code_interpreter" as kind}:
            return not _is_own(kind, tools)
    return choice == "required" and tools.has_computer


def chat_choice(choice: Any, tools: AskedTools) -> Any:
    """The `tool_choice` of a chat for the one of a response."""
    if tool_first(choice, tools):
        return None
    match choice:
        case {"type": "function" | "custom"}:
            return _named(choice)
        case {"type": "shell" | "local_shell" | "apply_patch" as kind}:
            return _named({"name": kind})
        case {"type": "allowed_tools"}:
            return _allowed(choice, tools)
    return choice


def _allowed(choice: Tool, tools: AskedTools) -> Any:
    """Hosted tools are always allowed: the computer is never taken away."""
    entries = choice.get("tools") or []
    named = [each for entry in entries for each in _all(entry, tools)]
    hosted = any(not _all(entry, tools) for entry in entries)
    mode = "auto" if hosted else choice.get("mode") or "auto"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _all(entry: Tool, tools: AskedTools) -> list[dict[str, Any]]:
    """The one of the client's that is named, or all of its namespace."""
    match entry:
        case {"type": "function" | "custom"}:
            return [_named(entry)]
        case {"type": "namespace", "name": namespace}:
            within = (tool for tool in tools.own.values() if tool.get("namespace") == namespace)
            return [_named(tool) for tool in within]
        case {"type": str(kind)} if _is_own(kind, tools):
            return [_named({"name": kind})]
    return []


def _is_own(kind: str, tools: AskedTools) -> bool:
    """Whether the client runs the tool of that kind itself."""
    return kind in tools.own and tools.own[kind]["type"] == kind


def _named(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function_name(tool)}}


def _container(tool: Mapping[str, Any], index: int) -> tuple[str, Mapping[str, Any]] | None:
    """The computer that a tool describes, and where."""
    match tool:
        case {"type": "shell", "environment": dict(environment)}:
            return f"tools[{index}].environment", environment
        case {"type": "code_interpreter", "container": str(id)}:
            return f"tools[{index}].container", {"container_id": id}
        case {"type": "code_interpreter", "container": dict(container)}:
            return f"tools[{index}].container", container
    return None


def _is_computer(tool: Tool) -> bool:
    return tool["type"] in ("shell", "code_interpreter") and not run_by_client(tool)


def _shown_as(tool: Mapping[str, Any]) -> HostedTool | None:
    """A shell without an environment is one whose calls clients run themselves: such a client is
    shown none."""
    if tool["type"] == "code_interpreter":
        return "code_interpreter"
    return "shell" if _is_computer(tool) and tool.get("environment") else None
