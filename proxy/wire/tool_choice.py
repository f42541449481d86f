"""Which of its own tools a client wants called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import BadRequestError

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of `tools` and `tool_choice`, whose shapes are right."""

    tools: Tools
    """Those that the model is told of."""
    first: Any
    """The `tool_choice` of the first call."""
    must_call: bool
    """Whether the run has to end in a call of one of them."""


def chosen(tools: Tools, choice: Any) -> Choice:
    """Raises BadRequestError for a tool that there is not."""
    if choice == "required" and tools:
        return Choice(tools, None, must_call=True)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            names = [_name(tool) for tool in allowed]
            _require(names, tools, "tool_choice.allowed_tools.tools")
            left = [tool for tool in tools if _name(tool) in names]
            return Choice(left, None, must_call=mode == "required" and bool(left))
        case {"type": "function"}:
            _require([_name(choice)], tools, "tool_choice.function.name")
    return Choice(tools, choice, must_call=False)


def _require(names: Sequence[str], tools: Tools, param: str) -> None:
    known = {_name(tool) for tool in tools}
    for name in names:
        if name not in known:
            raise BadRequestError(
                f"Invalid value for 'tool_choice': no function named {name!r} was specified in the"
                " 'tools' parameter.",
                param=param,
            )


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else ""
