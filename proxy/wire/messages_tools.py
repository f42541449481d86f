"""Tools as Anthropic's Messages API has them, and as chat completions do."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import BadRequestError
from proxy.wire.validation import array, boolean, having, mapping, text

Tool = Mapping[str, Any]
CODE_EXECUTION = "code_execution"
_CODE_EXECUTION = re.compile(rf"{CODE_EXECUTION}_\d{{8}}")
_NAMED = having({"name": text})
_CUSTOM = having(
    {"name": text, "input_schema": mapping},
    {"description": text, "strict": boolean, "allowed_callers": array(text)},
)
_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_PAIR = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request."""

    own: Sequence[Tool]
    """Those that the client runs, each with a schema."""
    code_execution: bool
    """Whether it asks for a computer of the server's."""


def offered(tools: Sequence[Tool]) -> Offered:
    """Raises BadRequestError for tools that nobody here could run."""
    own: list[Tool] = []
    code_execution = False
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and _CODE_EXECUTION.fullmatch(kind):
            code_execution = True
        else:
            own.append(_own(tool, str(kind), f"tools[{index}]"))
    return Offered(own, code_execution)


def chat_tool(tool: Tool) -> dict[str, Any]:
    """A tool of the client's as chat completions have it."""
    parameters = dict(tool["input_schema"])
    if tool.get("input_examples"):
        parameters["examples"] = tool["input_examples"]
    function = {"name": tool["name"], "parameters": parameters}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any], tools: Offered) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls`."""
    given: dict[str, Any] = {}
    match choice["type"]:
        case "auto" | "none" as word:
            given["tool_choice"] = word
        case "any":
            given["tool_choice"] = None if tools.code_execution else "required"
        case _ if tools.code_execution and choice["name"] == CODE_EXECUTION:
            given["tool_choice"] = None
        case _ if any(tool["name"] == choice["name"] for tool in tools.own):
            function = {"name": choice["name"]}
            given["tool_choice"] = {"type": "function", "function": function}
        case _:
            raise BadRequestError(
                f"Tool '{choice['name']}' not found in provided tools.", param="tool_choice.name"
            )
    if choice.get("disable_parallel_tool_use") is not None:
        given["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return given


def _own(tool: Tool, kind: str, param: str) -> Tool:
    if kind == "custom":
        _CUSTOM(tool, param)
        if "direct" not in (tool.get("allowed_callers") or ["direct"]):
            raise BadRequestError(
                "A tool that only code may call is not served here.",
                param=f"{param}.allowed_callers",
            )
        return tool
    name, day = kind.rpartition("_")[::2]
    described = _ANTHROPICS.get(name)
    if described is None or not day.isdecimal():
        raise BadRequestError(
            f"The server tool '{kind}' is not served here. There are code_execution, tools of your"
            f" own, and Anthropic's {', '.join(_ANTHROPICS)}, which you run.",
            param=f"{param}.type",
            code="unsupported_tool",
        )
    _NAMED(tool, param)
    return {"name": tool["name"], **described(tool, day)}


def _schema(description: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"description": description, "input_schema": schema}


def _one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


def _about(kind: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**kind, "description": description}


def _bash(tool: Tool, day: str) -> dict[str, Any]:
    return _schema(
        "Run a command in the user's own bash session, which goes on between calls.",
        [],
        command=_about(_STRING, "The command to run; not needed to restart."),
        restart=_about({"type": "boolean"}, "Whether to begin the session anew."),
    )


def _text_editor(tool: Tool, day: str) -> dict[str, Any]:
    commands = ["view", "create", "str_replace", "insert"]
    if day < "20250429":
        commands.append("undo_edit")
    return _schema(
        "View and edit files on the user's own computer.",
        ["command", "path"],
        command=_one_of(*commands),
        path=_about(_STRING, "The file, or for view a directory."),
        file_text=_about(_STRING, "create: the content."),
        old_str=_about(_STRING, "str_replace: the text to replace, which must occur once."),
        new_str=_about(_STRING, "str_replace: the text in its place. insert: the text to insert."),
        insert_line=_about(_INTEGER, "insert: the line to insert after; 0 for the start."),
        insert_text=_about(_STRING, "insert: the text once more."),
        view_range=_about(_PAIR, "view: first and last line; -1 as the last for the end."),
    )


def _memory(tool: Tool, day: str) -> dict[str, Any]:
    return _schema(
        "View and keep notes in files below /memories, which outlive the conversation.",
        ["command"],
        command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_about(_STRING, "The file or directory, for all but rename."),
        view_range=_about(_PAIR, "view: first and last line."),
        file_text=_about(_STRING, "create: the content."),
        old_str=_about(_STRING, "str_replace: the text to replace."),
        new_str=_about(_STRING, "str_replace: the text in its place."),
        insert_line=_about(_INTEGER, "insert: the line to insert at."),
        insert_text=_about(_STRING, "insert: the text to insert."),
        old_path=_about(_STRING, "rename: the path now."),
        new_path=_about(_STRING, "rename: the path then."),
    )


_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
    *("middle_click", "double_click", "screenshot", "cursor_position"),
)
_ACTIONS_OF_2025 = (
    *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click"),
)


def _computer(tool: Tool, day: str) -> dict[str, Any]:
    actions = [*_ACTIONS, *(_ACTIONS_OF_2025 if day >= "20250124" else ())]
    if tool.get("enable_zoom"):
        actions.append("zoom")
    size = f"{tool.get('display_width_px')} x {tool.get('display_height_px')}"
    return _schema(
        f"Use the user's own screen ({size} pixels), mouse and keyboard.",
        ["action"],
        action=_one_of(*actions),
        coordinate=_about(_PAIR, "Where: [x, y] in pixels from the top left."),
        start_coordinate=_about(_PAIR, "left_click_drag: where it begins."),
        text=_about(_STRING, "type: the text. key, hold_key: the keys, such as ctrl+s."),
        scroll_direction=_one_of("up", "down", "left", "right"),
        scroll_amount=_about(_INTEGER, "scroll: how many clicks of the wheel."),
        duration=_about(_NUMBER, "hold_key, wait: seconds."),
        region=_about(
            {"type": "array", "items": _INTEGER, "minItems": 4, "maxItems": 4},
            "zoom: [x0, y0, x1, y1].",
        ),
    )


_ANTHROPICS = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}
"""Tools that the client runs and whose schemas Anthropic's models know; others must be told."""
