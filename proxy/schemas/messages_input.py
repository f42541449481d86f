"""Messages and tools of Anthropic's Messages API as messages and tools of chat completions."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from policies.history import UNANSWERED, join_texts
from proxy.errors import BadRequestError
from proxy.schemas.chat_request import ChatMessages
from proxy.schemas.validation import array, check_boolean, check_mapping, check_text, object_with

# Messages

Block = Mapping[str, Any]
Part = dict[str, Any]
BlockWithPath = tuple[str, Block]
"""A block's path in the request, and the block."""
SYSTEM = "system"
_SYSTEM_LABEL = "[From the system:]"
_BILLING_PREFIX = "x-anthropic-billing-header:"
"""The beginning of a system text that Claude Code sends. The proxy drops this text: it differs in
each chat, so no chat could use the cached prompt prefix of another chat."""


def to_chat_messages(system: Any, messages: Sequence[Block]) -> ChatMessages:
    """Return the messages, which are already checked, and the system prompt as chat messages.

    Thinking and calls of server tools, such as the steps of earlier runs, are dropped: a model
    whose messages contain such text imitates it.
    """
    chat = ChatMessages()
    first = sum(1 for _ in takewhile(lambda message: message["role"] == SYSTEM, messages))
    prompts = (system, *(message["content"] for message in messages[:first]))
    if prompt := "\n\n".join(filter(None, map(_system_text, prompts))):
        chat.messages.append({"role": SYSTEM, "content": prompt})
    # Anthropic treats consecutive messages of one role as one message.
    numbered = list(enumerate(messages))[first:]
    for is_assistant, group in groupby(numbered, key=lambda pair: pair[1]["role"] == "assistant"):
        blocks = [block for n, message in group for block in _blocks_of(message, f"messages[{n}]")]
        if is_assistant:
            chat.messages.append(_assistant_message(block for _, block in blocks))
        else:
            _add_user_blocks(chat, blocks)
    return chat


def _blocks_of(message: Block, path: str) -> list[BlockWithPath]:
    """Return the blocks of a message. A later system message becomes text of the user, because many
    chat templates refuse a system message that is not the first message."""
    path = f"{path}.content"
    blocks = _blocks_with_paths(message["content"], path)
    if message["role"] != SYSTEM:
        return blocks
    texts = (block["text"] for _, block in blocks)
    return [(path, _text_part(f"{_SYSTEM_LABEL}\n{text}")) for text in texts if text]


def _blocks_with_paths(content: Any, path: str) -> list[BlockWithPath]:
    if isinstance(content, str):
        return [(path, _text_part(content))]
    return [(f"{path}[{index}]", block) for index, block in enumerate(content)]


def _blocks(content: Any) -> list[Block]:
    return [block for _, block in _blocks_with_paths(content or (), "")]


def _system_text(content: Any) -> str:
    texts = (block["text"] for block in _blocks(content))
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING_PREFIX))


def _add_user_blocks(chat: ChatMessages, blocks: Sequence[BlockWithPath]) -> None:
    """Add each tool result as a message, then the other blocks as one message of the user."""
    parts: list[tuple[str, Part]] = []
    for path, block in blocks:
        if block["type"] != "tool_result":
            continue
        content = [part for inner in _blocks(block.get("content")) for part in _parts(inner)]
        result = _result_text(content, is_error=bool(block.get("is_error")))
        call_id = block["tool_use_id"]
        chat.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if files := [part for part in content if part["type"] != "text"]:
            # Backends accept files only in messages of the user.
            parts += [(path, part) for part in (_text_part(f"[From tool call {call_id}:]"), *files)]
    for path, block in blocks:
        if block["type"] != "tool_result":
            parts += [(path, part) for part in _parts(block)]
    if not parts:
        return
    for index, (path, _) in enumerate(parts):
        chat.param_paths[f"messages[{len(chat.messages)}].content[{index}]"] = path
    chat.messages.append({"role": "user", "content": _text_or_parts([part for _, part in parts])})


def _text_or_parts(parts: list[Part]) -> str | list[Part]:
    """Return the parts, or one string if all are text, because many chat templates accept only
    strings."""
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _result_text(parts: Sequence[Part], *, is_error: bool) -> str:
    """Return the parts of a tool result as the text that the model sees."""
    result = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if any(part["type"] != "text" for part in parts):
        result = f"{result}\n[What else it gave follows.]".lstrip()
    return f"The tool failed: {result}" if is_error else result


def _parts(block: Block) -> list[Part]:
    """Return a content block as parts of a chat message. `tool_result` is not accepted."""
    match block["type"]:
        case "text":
            return [_text_part(block["text"])]
        case "image":
            return [_image_part(block["source"])]
        case "document":
            return _document_parts(block)
        case "search_result":
            head = f"[Search result: {block['title']} ({block['source']})]"
            return [_text_part("\n".join([head, *(text["text"] for text in block["content"])]))]
        case "tool_reference":
            return [_text_part(f"[Tool: {block['tool_name']}]")]
        case _:  # container_upload
            return [_file_part(file_id=block["file_id"])]


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def _image_part(source: Block) -> Part:
    if source["type"] == "file":
        return {"type": "input_image", "file_id": source["file_id"]}
    url = source["url"] if source["type"] == "url" else _data_url(source)
    return {"type": "image_url", "image_url": {"url": url}}


def _document_parts(block: Block) -> list[Part]:
    """Return a document as parts: a file, or its text and images."""
    source, title, context = block["source"], block.get("title"), block.get("context")
    named = {"filename": title} if title else {}
    heading = f"[Document: {title or 'untitled'}]"
    match source["type"]:
        case "base64":
            parts = [_file_part(file_data=_data_url(source), **named)]
        case "url":
            parts = [_file_part(file_url=source["url"], **named)]
        case "file":
            parts = [_file_part(file_id=source["file_id"], **named)]
        case "text":
            parts = [_text_part(f"{heading}\n{source['data']}")]
        case _:  # content
            inner = [part for each in _blocks(source["content"]) for part in _parts(each)]
            parts = [_text_part(heading), *inner]
    return [*parts, _text_part(f"[About this document: {context}]")] if context else parts


def _file_part(**fields: str) -> Part:
    return {"type": "file", "file": fields}


def _data_url(source: Block) -> str:
    return f"data:{source['media_type']};base64,{source['data']}"


def _assistant_message(blocks: Iterable[Block]) -> dict[str, Any]:
    """Return the message of the assistant with the text and the client's tool calls of its
    blocks."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for kind, group in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":  # citations divide one text into several blocks
            texts.append("".join(block["text"] for block in group))
        elif kind == "compaction":  # summarizes all messages before it
            texts += [block["content"] for block in group if block.get("content")]
        elif kind == "tool_use":
            calls += map(_tool_call, group)
    content = join_texts(list(filter(None, texts)))
    if calls:
        return {"role": "assistant", "content": content or None, "tool_calls": calls}
    return {"role": "assistant", "content": content or UNANSWERED}


def _tool_call(block: Block) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


# Tools

Tool = Mapping[str, Any]
CODE_EXECUTION = "code_execution"
_CODE_EXECUTION = re.compile(rf"{CODE_EXECUTION}_\d{{8}}")
_NAMED_TOOL = object_with({"name": check_text})
_CUSTOM_TOOL = object_with(
    {"name": check_text, "input_schema": check_mapping},
    {"description": check_text, "strict": check_boolean, "allowed_callers": array(check_text)},
)
_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_INTEGER_PAIR = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class MessagesToolSet:
    """The tools of a request."""

    client_tools: Sequence[Tool]
    """The tools that the client runs, each with a schema."""
    has_code_execution: bool
    """True if the request has the code execution tool."""


def read_tools(tools: Sequence[Tool]) -> MessagesToolSet:
    """Return the tools of a request. Raises BadRequestError for a tool that is not available."""
    client_tools: list[Tool] = []
    code_execution = False
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and _CODE_EXECUTION.fullmatch(kind):
            code_execution = True
        else:
            client_tools.append(_client_tool(tool, str(kind), f"tools[{index}]"))
    return MessagesToolSet(client_tools, code_execution)


def chat_tool(tool: Tool) -> dict[str, Any]:
    """Return a client's tool as a tool of a chat completion."""
    parameters = dict(tool["input_schema"])
    if tool.get("input_examples"):
        parameters["examples"] = tool["input_examples"]
    function = {"name": tool["name"], "parameters": parameters}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any], tools: MessagesToolSet) -> dict[str, Any]:
    """Translate Anthropic's `tool_choice` into the `tool_choice` of a chat completion and, if it
    has `disable_parallel_tool_use`, into `parallel_tool_calls`. The new `tool_choice` is None if
    the model may call the sandbox's tools instead. Raises BadRequestError for an unknown tool."""
    params: dict[str, Any] = {}
    match choice["type"]:
        case "auto" | "none" as mode:
            params["tool_choice"] = mode
        case "any":
            params["tool_choice"] = None if tools.has_code_execution else "required"
        case _ if tools.has_code_execution and choice["name"] == CODE_EXECUTION:
            params["tool_choice"] = None
        case _ if any(tool["name"] == choice["name"] for tool in tools.client_tools):
            function = {"name": choice["name"]}
            params["tool_choice"] = {"type": "function", "function": function}
        case _:
            raise BadRequestError(
                f"Tool '{choice['name']}' not found in provided tools.", param="tool_choice.name"
            )
    if choice.get("disable_parallel_tool_use") is not None:
        params["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return params


def _client_tool(tool: Tool, kind: str, param: str) -> Tool:
    """Return a tool with its schema. Raises BadRequestError for a tool that is not available."""
    if kind == "custom":
        _CUSTOM_TOOL(tool, param)
        if "direct" not in (tool.get("allowed_callers") or ["direct"]):
            raise BadRequestError(
                "Tools that only code may call are not served here.",
                param=f"{param}.allowed_callers",
            )
        return tool
    name, date = kind.rpartition("_")[::2]
    make_schema = _CLIENT_TOOLS.get(name)
    if make_schema is None or not date.isdecimal():
        raise BadRequestError(
            f"The server tool '{kind}' is not served here. There are code_execution, tools of your"
            f" own, and Anthropic's {', '.join(_CLIENT_TOOLS)}, which you run.",
            param=f"{param}.type",
            code="unsupported_tool",
        )
    _NAMED_TOOL(tool, param)
    return {"name": tool["name"], **make_schema(tool, date)}


def _tool_schema(description: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"description": description, "input_schema": schema}


def _enum_schema(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _with_description(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _bash_schema(tool: Tool, date: str) -> dict[str, Any]:
    return _tool_schema(
        "Run a command in the user's own bash session, which goes on between calls.",
        [],
        command=_with_description(_STRING, "The command to run; not needed to restart."),
        restart=_with_description({"type": "boolean"}, "Whether to begin the session anew."),
    )


def _text_editor_schema(tool: Tool, date: str) -> dict[str, Any]:
    commands = ["view", "create", "str_replace", "insert"]
    if date < "20250429":
        commands.append("undo_edit")
    return _tool_schema(
        "View and edit files on the user's own computer.",
        ["command", "path"],
        command=_enum_schema(*commands),
        path=_with_description(_STRING, "The file, or for view a directory."),
        file_text=_with_description(_STRING, "create: the content."),
        old_str=_with_description(
            _STRING, "str_replace: the text to replace, which must occur once."
        ),
        new_str=_with_description(
            _STRING, "str_replace: the text in its place. insert: the text to insert."
        ),
        insert_line=_with_description(
            _INTEGER, "insert: the line to insert after; 0 for the start."
        ),
        insert_text=_with_description(_STRING, "insert: the text once more."),
        view_range=_with_description(
            _INTEGER_PAIR, "view: first and last line; -1 as the last for the end."
        ),
    )


def _memory_schema(tool: Tool, date: str) -> dict[str, Any]:
    return _tool_schema(
        "View and keep notes in files below /memories, which outlive the conversation.",
        ["command"],
        command=_enum_schema("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_with_description(_STRING, "The file or directory, for all but rename."),
        view_range=_with_description(_INTEGER_PAIR, "view: first and last line."),
        file_text=_with_description(_STRING, "create: the content."),
        old_str=_with_description(_STRING, "str_replace: the text to replace."),
        new_str=_with_description(_STRING, "str_replace: the text in its place."),
        insert_line=_with_description(_INTEGER, "insert: the line to insert at."),
        insert_text=_with_description(_STRING, "insert: the text to insert."),
        old_path=_with_description(_STRING, "rename: the path now."),
        new_path=_with_description(_STRING, "rename: the path then."),
    )


_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
    *("middle_click", "double_click", "screenshot", "cursor_position"),
)
_ACTIONS_SINCE_2025 = (
    *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click"),
)


def _computer_schema(tool: Tool, date: str) -> dict[str, Any]:
    actions = [*_ACTIONS, *(_ACTIONS_SINCE_2025 if date >= "20250124" else ())]
    if tool.get("enable_zoom"):
        actions.append("zoom")
    size = f"{tool.get('display_width_px')} x {tool.get('display_height_px')}"
    return _tool_schema(
        f"Use the user's own screen ({size} pixels), mouse and keyboard.",
        ["action"],
        action=_enum_schema(*actions),
        coordinate=_with_description(_INTEGER_PAIR, "Where: [x, y] in pixels from the top left."),
        start_coordinate=_with_description(_INTEGER_PAIR, "left_click_drag: where it begins."),
        text=_with_description(_STRING, "type: the text. key, hold_key: the keys, such as ctrl+s."),
        scroll_direction=_enum_schema("up", "down", "left", "right"),
        scroll_amount=_with_description(_INTEGER, "scroll: how many clicks of the wheel."),
        duration=_with_description(_NUMBER, "hold_key, wait: seconds."),
        region=_with_description(
            {"type": "array", "items": _INTEGER, "minItems": 4, "maxItems": 4},
            "zoom: [x0, y0, x1, y1].",
        ),
    )


_CLIENT_TOOLS = {
    "bash": _bash_schema,
    "text_editor": _text_editor_schema,
    "memory": _memory_schema,
    "computer": _computer_schema,
}
"""Anthropic's tools that the client runs. Only Anthropic's models know them without a schema."""
