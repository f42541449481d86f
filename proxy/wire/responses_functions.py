"""The client's own tools of /v1/responses, each of them a function of the chat below."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from proxy.wire.responses_builtin import SEARCH, Tool, described, run_by_client


def function_name(named: Mapping[str, Any]) -> str:
    """What the model calls a tool, from all that bears its name: itself, a call, a choice."""
    name, namespace = named.get("name"), named.get("namespace")
    return f"{namespace}__{name}" if namespace else str(name)


def own_tools(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Those that the client runs, by what the model calls them; their shapes are right. Of two that
    are called the same the last one holds: what a search finds may be there already."""
    return {function_name(tool): tool for offered in tools for tool in _apart(offered)}


def brought(items: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools that items of the input add."""
    adding = ("additional_tools", f"{SEARCH}_output")
    return [tool for item in items if item.get("type") in adding for tool in item["tools"]]


def in_chat(tool: Tool) -> dict[str, Any]:
    """A tool as a chat has it."""
    named = {**tool, "name": function_name(tool)}
    if tool["type"] == "custom":
        return {"type": "custom", "custom": _custom_in_chat(named)}
    names = ("name", "description", "parameters", "strict")
    told = {name: named[name] for name in names if named.get(name) is not None}
    return {"type": "function", "function": told}


def _custom_in_chat(tool: Tool) -> dict[str, Any]:
    """A tool that takes free text, as a chat has it: with its grammar one level further in."""
    told = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    match tool.get("format"):
        case {"type": "grammar", **grammar}:
            told["format"] = {"type": "grammar", "grammar": grammar}
    return told


def found(tools: Iterable[Tool]) -> str:
    """What the model is told of the tools that a search has found."""
    names = own_tools(tools)
    if not names:
        return "No tools were found."
    return "These tools can be called from now on: " + ", ".join(names)


def written_arguments(call: Mapping[str, Any]) -> str:
    """The arguments of a call that comes back, as the model wrote them."""
    if call["type"] == "custom_tool_call":
        return json.dumps({"input": call["input"]})
    return str(call["arguments"])


def _apart(tool: Tool) -> Iterator[Tool]:
    match tool["type"]:
        case "function" | "custom":
            yield tool
        case _ if run_by_client(tool):
            yield described(tool)
        case "namespace":
            about = f"{tool['description']}\n\n" if tool.get("description") else ""
            for each in tool["tools"]:
                description = f"{about}{each.get('description') or ''}".strip()
                yield {**each, "namespace": tool["name"], "description": description}
                about = ""  # told once: it holds for all that follow
