"""Messages and tools of Anthropic's Messages API as those of chat completions."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

from policies.history import UNANSWERED, join_texts
from proxy.errors import BadRequestError
from proxy.schemas.validation import array, boolean, mapping, object_with, text

# Messages

Block = Mapping[str, Any]
Part = dict[str, Any]
Message = dict[str, Any]
PlacedFile = tuple[str, Block]
"""A block and its path in the request."""
SYSTEM = "system"
_FROM_SYSTEM = "[From the system:]"
_BILLING = "x-anthropic-billing-header:"
"""Begins a text of Claude Code's for Anthropic. It differs from chat to chat, so that no chat could
use the cached prefix of another; the text is dropped."""


@dataclass(slots=True)
class ChatMessages:
    """The messages of a chat completion."""

    messages: list[Message] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Paths in the messages, and the paths of the same parts in the request."""

    def add_user(self, parts: Sequence[tuple[str, Part]]) -> None:
        """Add a message of the user; each part comes with its path in the request."""
        here = f"messages[{len(self.messages)}]"
        for index, (place, _) in enumerate(parts):
            self.places[f"{here}.content[{index}]"] = place
        self.messages.append({"role": "user", "content": _content([part for _, part in parts])})


def to_chat_messages(system: Any, messages: Sequence[Block]) -> ChatMessages:
    """Return checked messages and the system prompt as messages of a chat completion.

    Thinking and the calls of server tools, among them the steps of earlier runs, are dropped: a
    model imitates them when it finds them among its own words.
    """
    chat = ChatMessages()
    first = sum(1 for _ in takewhile(lambda turn: turn["role"] == SYSTEM, messages))
    opening = [
        _words(_blocks(each)) for each in (system, *(t["content"] for t in messages[:first]))
    ]
    if words := "\n\n".join(filter(None, opening)):
        chat.messages.append({"role": SYSTEM, "content": words})
    # Anthropic takes consecutive messages of one role as one.
    numbered = list(enumerate(messages))[first:]
    for is_assistant, same in groupby(numbered, key=lambda each: each[1]["role"] == "assistant"):
        placed = [each for index, turn in same for each in _of_turn(turn, f"messages[{index}]")]
        if is_assistant:
            chat.messages.append(_assistant(block for _, block in placed))
        else:
            _tell_user(chat, placed)
    return chat


def _of_turn(turn: Block, param: str) -> list[PlacedFile]:
    """Return the blocks of a message. A later system message becomes text of the user, because many
    chat templates refuse a system message that is not the first."""
    placed = _placed(turn["content"], f"{param}.content")
    if turn["role"] != SYSTEM:
        return placed
    words = (f"{_FROM_SYSTEM}\n{block['text']}" for _, block in placed if block["text"])
    return [(f"{param}.content", _text(each)) for each in words]


def _placed(content: Any, place: str) -> list[PlacedFile]:
    if isinstance(content, str):
        return [(place, _text(content))]
    return [(f"{place}[{index}]", block) for index, block in enumerate(content)]


def _blocks(content: Any) -> list[Block]:
    return [block for _, block in _placed(content or (), "")]


def _words(blocks: Iterable[Block]) -> str:
    texts = (block["text"] for block in blocks)
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _tell_user(chat: ChatMessages, placed: Sequence[PlacedFile]) -> None:
    """Add tool results as messages of their own, then the other blocks as one message."""
    parts: list[tuple[str, Part]] = []
    for place, block in placed:
        if block["type"] != "tool_result":
            continue
        told = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block)}
        chat.messages.append(told)
        parts += [(place, part) for part in _shown_by(block)]
    for place, block in placed:
        if block["type"] != "tool_result":
            parts += [(place, part) for part in _parts(block)]
    if parts:
        chat.add_user(parts)


def _content(parts: list[Part]) -> str | list[Part]:
    """Return text alone as a string, because many chat templates know no other content."""
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _result(block: Block) -> str:
    parts = [part for each in _blocks(block.get("content")) for part in _parts(each)]
    words = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if any(part["type"] != "text" for part in parts):
        words = f"{words}\n[What else it gave follows.]".lstrip()
    return f"The tool failed: {words}" if block.get("is_error") else words


def _shown_by(block: Block) -> list[Part]:
    """Return a tool result's files: backends accept these in messages of the user only."""
    parts = [part for each in _blocks(block.get("content")) for part in _parts(each)]
    shown = [part for part in parts if part["type"] != "text"]
    return [_text(f"[From tool call {block['tool_use_id']}:]"), *shown] if shown else []


def _parts(block: Block) -> list[Part]:
    """Return a block of a user message as parts of a chat message."""
    match block["type"]:
        case "text":
            return [_text(block["text"])]
        case "image":
            return [_image(block["source"])]
        case "document":
            return _document(block)
        case "search_result":
            head = f"[Search result: {block['title']} ({block['source']})]"
            return [_text("\n".join([head, *(each["text"] for each in block["content"])]))]
        case "tool_reference":
            return [_text(f"[Tool: {block['tool_name']}]")]
        case _:  # container_upload
            return [{"type": "file", "file": {"file_id": block["file_id"]}}]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _image(source: Block) -> Part:
    if source["type"] == "file":
        return {"type": "input_image", "file_id": source["file_id"]}
    url = source["url"] if source["type"] == "url" else _data_url(source)
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Block) -> list[Part]:
    """Return a document as a file, or as text if it consists of text."""
    source, title, context = block["source"], block.get("title"), block.get("context")
    named = {"filename": title} if title else {}
    match source["type"]:
        case "base64":
            told: list[Part] = [_file({"file_data": _data_url(source), **named})]
        case "url":
            told = [_file({"file_url": source["url"], **named})]
        case "file":
            told = [_file({"file_id": source["file_id"], **named})]
        case "text":
            told = [_text(f"[Document: {title or 'untitled'}]\n{source['data']}")]
        case _:  # content
            inner = [part for each in _blocks(source["content"]) for part in _parts(each)]
            told = [_text(f"[Document: {title or 'untitled'}]"), *inner]
    return [*told, _text(f"[About this document: {context}]")] if context else told


def _file(fields: dict[str, Any]) -> Part:
    return {"type": "file", "file": fields}


def _data_url(source: Block) -> str:
    return f"data:{source['media_type']};base64,{source['data']}"


def _assistant(blocks: Iterable[Block]) -> Message:
    """Return a message with the text and the client's tool calls."""
    words: list[str] = []
    calls: list[dict[str, Any]] = []
    for kind, alike in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":  # citations divide one text into several blocks
            words.append("".join(block["text"] for block in alike))
        elif kind == "compaction":  # replaces all messages before it
            words += [block["content"] for block in alike if block.get("content")]
        elif kind == "tool_use":
            calls += map(_call, alike)
    content = join_texts(list(filter(None, words)))
    if calls:
        return {"role": "assistant", "content": content or None, "tool_calls": calls}
    return {"role": "assistant", "content": content or UNANSWERED}


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


# Tools

Tool = Mapping[str, Any]
CODE_EXECUTION = "code_execution"
_CODE_EXECUTION = re.compile(rf"{CODE_EXECUTION}_\d{{8}}")
_NAMED = object_with({"name": text})
_CUSTOM = object_with(
    {"name": text, "input_schema": mapping},
    {"description": text, "strict": boolean, "allowed_callers": array(text)},
)
_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_PAIR = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class MessagesToolSet:
    """The tools of a request."""

    own: Sequence[Tool]
    """The tools that the client runs, each with a schema."""
    code_execution: bool
    """Whether the request has the code execution tool."""


def read_tools(tools: Sequence[Tool]) -> MessagesToolSet:
    """Return the tools of a request. Raises BadRequestError for a tool that is not available."""
    own: list[Tool] = []
    code_execution = False
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and _CODE_EXECUTION.fullmatch(kind):
            code_execution = True
        else:
            own.append(_client_tool(tool, str(kind), f"tools[{index}]"))
    return MessagesToolSet(own, code_execution)


def chat_tool(tool: Tool) -> dict[str, Any]:
    """Return a client's tool as a tool of a chat completion."""
    parameters = dict(tool["input_schema"])
    if tool.get("input_examples"):
        parameters["examples"] = tool["input_examples"]
    function = {"name": tool["name"], "parameters": parameters}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any], tools: MessagesToolSet) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls`. Raises BadRequestError for unknown tools."""
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


def _client_tool(tool: Tool, kind: str, param: str) -> Tool:
    if kind == "custom":
        _CUSTOM(tool, param)
        if "direct" not in (tool.get("allowed_callers") or ["direct"]):
            raise BadRequestError(
                "A tool that only code may call is not served here.",
                param=f"{param}.allowed_callers",
            )
        return tool
    name, day = kind.rpartition("_")[::2]
    described = _CLIENT_TOOLS.get(name)
    if described is None or not day.isdecimal():
        raise BadRequestError(
            f"The server tool '{kind}' is not served here. There are code_execution, tools of your"
            f" own, and Anthropic's {', '.join(_CLIENT_TOOLS)}, which you run.",
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


_CLIENT_TOOLS = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}
"""Tools of Anthropic's that the client runs. Its models know their schemas; other models do not."""
