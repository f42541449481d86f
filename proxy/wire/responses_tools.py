"""The tools of /v1/responses: functions for the chat below, and which computer was asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HostedTool = Literal["shell", "code_interpreter"]
CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Of a tool that takes free text: the model writes it as the one argument of a function."""


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What `tools` comes to."""

    functions: Sequence[Mapping[str, Any]] = ()
    """The client's own, as chat completions have them."""
    custom: frozenset[str] = frozenset()
    """The names of those that take free text."""
    shows: HostedTool | None = None
    """The hosted tool under whose name steps may be shown."""
    has_computer: bool = False
    """Whether a hosted tool was asked for."""
    container_id: str | None = None
    files: Sequence[tuple[str, str]] = ()
    """Uploads that the computer begins with, and where in the request each is named."""
    networks: Sequence[tuple[str, str]] = field(default=())
    """What was said of the network, and where."""


def asked_tools(tools: Sequence[Mapping[str, Any]]) -> AskedTools:
    """Read them; their shapes are right."""
    containers = [found for n, tool in enumerate(tools) if (found := _container(tool, n))]
    types = {tool["type"] for tool in tools}
    shown = [_shown_as(tool) for tool in tools]
    return AskedTools(
        functions=[_function(tool) for tool in tools if tool["type"] in ("function", "custom")],
        custom=frozenset(tool["name"] for tool in tools if tool["type"] == "custom"),
        shows=next((name for name in shown if name), None),
        has_computer=bool(types & {"shell", "code_interpreter"}),
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
    )


def tool_first(choice: Any, tools: AskedTools) -> bool:
    """Whether the run is to begin with a tool, be it the computer."""
    match choice:
        case {"type": "shell" | "code_interpreter"}:
            return True
    return choice == "required" and tools.has_computer


def chat_choice(choice: Any, tools: AskedTools) -> Any:
    """The `tool_choice` of a chat for the one of a response."""
    if tool_first(choice, tools):
        return None
    match choice:
        case {"type": "function" | "custom"}:
            return _named(choice)
        case {"type": "allowed_tools"}:
            return _allowed(choice)
    return choice


def _allowed(choice: Mapping[str, Any]) -> Any:
    """Hosted tools are always allowed: the computer is never taken away."""
    entries = choice.get("tools") or []
    hosted = any(tool.get("type") not in ("function", "custom") for tool in entries)
    named = [_named(tool) for tool in entries if tool.get("type") in ("function", "custom")]
    mode = "auto" if hosted else choice.get("mode") or "auto"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    told = {name: tool[name] for name in names if tool.get(name) is not None}
    if tool["type"] == "custom":
        told["parameters"] = CUSTOM_PARAMETERS
    return {"type": "function", "function": told}


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


def _shown_as(tool: Mapping[str, Any]) -> HostedTool | None:
    """A shell without an environment is one whose calls clients run themselves: such a client is
    shown none."""
    if tool["type"] == "code_interpreter":
        return "code_interpreter"
    return "shell" if tool["type"] == "shell" and tool.get("environment") else None
