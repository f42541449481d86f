"""POST /v1/responses: the translation of a request into a chat completion.

responses_parameters checks the fields, and responses_tools translates the tools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.history import is_step_id, join_texts
from proxy.errors import NotFoundError
from proxy.schemas.chat_request import ChatMessages, ChatTranslation
from proxy.schemas.responses_parameters import IGNORED_ITEM_TYPES, check_fields, item_type
from proxy.schemas.responses_tools import (
    ITEM_ID_PREFIXES,
    ResponsesToolSet,
    call_arguments,
    chat_choice,
    function_arguments,
    function_name,
    loaded_tools,
    read_tools,
    result_text,
    starts_with_tool,
    tool_search_result,
)

TRANSLATED_FIELDS: Mapping[str, str] = {
    "input": "Becomes `messages`.",
    "instructions": "Becomes a system message.",
    "tools": "Functions become `tools`. The hosted tools `shell` and `code_interpreter` become the"
    " sandbox's tools. `web_search` is left out, with a warning.",
    "tool_choice": "Becomes `tool_choice`.",
    "max_tool_calls": "Limits the tool calls of the run.",
    "text": "`format` becomes `response_format`, `verbosity` becomes `verbosity`.",
    "reasoning": "`effort` becomes `reasoning_effort`.",
    "max_output_tokens": "Becomes `max_completion_tokens`.",
    "include": "Adds the named fields to the response.",
    "stream_options": "Not sent.",
    "truncation": "Not sent: the proxy shortens the history of a run when it is too long.",
    "background": "The response is returned at once, and the run continues. Requires `store`.",
    "store": "Unless false, the response is stored, so that later requests can continue it.",
    "previous_response_id": "Continues the stored response.",
    "conversation": "Continues the stored conversation.",
    "sandbox": "The settings of the request's sandbox.",
    "access_programs": "Not sent.",
    "background_options": "Not sent.",
    "image": "Not sent.",
}
"""The use of each field that a chat completion has under another name, or not at all."""
INCLUDE_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesAsChat(ChatTranslation):
    """A request of the Responses API as a chat completion."""

    tools: ResponsesToolSet


def as_chat(
    body: Mapping[str, Any], earlier_items: Sequence[Mapping[str, Any]] = ()
) -> ResponsesAsChat:
    """Translate a request of the Responses API into a chat completion request. The items in
    `earlier_items` precede the request's input.

    Raises BadRequestError, and NotFoundError for a reference to an unknown item.
    """
    check_fields(body)
    items = body["input"] if isinstance(body["input"], list) else []
    tools = read_tools(body.get("tools") or [], loaded_tools([*earlier_items, *items]))
    chat = _to_chat_messages(body.get("instructions"), body["input"], earlier_items)
    sandbox = dict(body.get("sandbox") or {})
    file_ids = sandbox.get("file_ids") or []
    if tools.files and isinstance(file_ids, list):
        sandbox["file_ids"] = [*file_ids, *(file_id for _, file_id in tools.files)]
        for index, (param, _) in enumerate(tools.files, len(file_ids)):
            chat.param_paths[f"sandbox.file_ids[{index}]"] = param
    if tools.container_id and not sandbox.get("container_id"):
        sandbox["container_id"] = tools.container_id
    unchanged = {name: value for name, value in body.items() if name not in TRANSLATED_FIELDS}
    params = {name: value for name, value in _params(body, tools).items() if value is not None}
    return ResponsesAsChat(
        chat={**unchanged, **params, "messages": chat.messages, "sandbox": sandbox},
        param_paths={**chat.param_paths, **_PARAM_PATHS},
        starts_with_tool=starts_with_tool(body.get("tool_choice"), tools),
        tools=tools,
    )


_PARAM_PATHS = {
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


def include_contains(body: Mapping[str, Any], value: str) -> bool:
    """Return True if the field `include` of the request contains a value."""
    return value in (body.get("include") or [])


def _params(body: Mapping[str, Any], tools: ResponsesToolSet) -> dict[str, Any]:
    """Return the fields that a chat completion has under another name. Absent fields are None."""
    settings = body.get("text") or {}
    wants_logprobs = include_contains(body, INCLUDE_LOGPROBS) or body.get("top_logprobs")
    return {
        "tools": list(tools.functions) or None,
        "tool_choice": chat_choice(body.get("tool_choice"), tools),
        "response_format": _response_format(settings.get("format")),
        "verbosity": settings.get("verbosity"),
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "max_completion_tokens": body.get("max_output_tokens"),
        "logprobs": True if wants_logprobs else None,
    }


def _response_format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None:
        return None
    if text_format["type"] != "json_schema":
        return dict(text_format)
    named = {
        key: value for key, value in text_format.items() if key != "type" and value is not None
    }
    return {"type": "json_schema", "json_schema": named}


# Input

Item = dict[str, Any]
_HIDDEN_ID_PREFIXES = ("rs_", "sh_", "sho_", "ci_")
"""Prefixes of the ids of items that do not become messages. References to such items are ignored,
even if the item is not stored."""
_SYSTEM = ("system", "developer")


def _to_chat_messages(
    instructions: str | None,
    input: str | Sequence[Item],
    earlier_items: Sequence[Mapping[str, Any]],
) -> ChatMessages:
    """Return the instructions, the earlier items and the input as chat messages, in this order.

    The caller has checked their types. Raises NotFoundError for a reference to an unknown item.
    """
    chat = ChatMessages()
    if instructions:
        _append_message(chat, {"role": "system", "content": instructions}, "instructions")
    for item in earlier_items:
        _add_item(chat, dict(item), "input")
    if isinstance(input, str):
        _append_message(chat, {"role": "user", "content": input}, "input")
        return chat
    for index, item in enumerate(input):
        _add_item(chat, item, f"input[{index}]")
    return chat


def _append_message(chat: ChatMessages, message: dict[str, Any], path: str) -> None:
    """Add a message. `path` is the path of its item in the request."""
    chat_path = f"messages[{len(chat.messages)}]"
    if message["role"] == "tool":
        chat.param_paths[f"{chat_path}.content"] = f"{path}.output"
    chat.param_paths[chat_path] = path
    chat.messages.append(message)


def _last_message(chat: ChatMessages) -> dict[str, Any]:
    return chat.messages[-1] if chat.messages else {"role": None}


def input_items(input: str | Sequence[Item], run_id: str) -> list[Item]:
    """Return the input as items with ids. A string becomes a message."""
    items = [{"role": "user", "content": input}] if isinstance(input, str) else input
    return [_with_id(item, f"{run_id}_in{index}") for index, item in enumerate(items)]


def _with_id(item: Item, id_suffix: str) -> Item:
    kind = item_type(item)
    # The store replaces lone surrogates too.
    own_id = (item.get("id") or "").encode(errors="replace").decode()
    new_id = f"{ITEM_ID_PREFIXES.get(kind, kind)}_{id_suffix}"
    identified = {**item, "type": kind, "id": own_id or new_id}
    if kind == "message" and isinstance(item["content"], str):
        part_type = "output_text" if item["role"] == "assistant" else "input_text"
        part: Item = {"type": part_type, "text": item["content"]}
        if part_type == "output_text":
            part |= {"annotations": [], "logprobs": []}
        identified["content"] = [part]
    return {"status": "completed", **identified} if kind in ITEM_ID_PREFIXES else identified


def _add_item(chat: ChatMessages, item: Item, path: str) -> None:
    kind = item_type(item)
    if kind in IGNORED_ITEM_TYPES or _is_hosted(item):
        return
    if kind == "item_reference":
        if item["id"].startswith(_HIDDEN_ID_PREFIXES):
            return
        raise NotFoundError(f"Item with id '{item['id']}' not found.", param="input")
    if kind == "message":
        _add_message(chat, item, path)
    elif kind.endswith("_call"):
        _add_call(chat, _tool_call(item), path)
    else:
        call_id = item["id"] if item.get("call_id") is None else item["call_id"]
        _append_message(
            chat, {"role": "tool", "tool_call_id": call_id, "content": _result_content(item)}, path
        )


def _is_hosted(item: Item) -> bool:
    """Return True for the call or the result of a tool that a server ran. Such items do not become
    messages."""
    kind = item_type(item)
    if kind in ("tool_search_call", "tool_search_output"):
        return item.get("call_id") is None
    if kind in ("shell_call", "shell_call_output"):
        environment = item.get("environment") or {}
        return is_step_id(item["call_id"]) or environment.get("type") == "container_reference"
    return False


def _result_content(item: Item) -> Any:
    """Return a call's result as the content of a chat message."""
    match item["type"]:
        case "tool_search_output":
            return tool_search_result(item["tools"])
        case "function_call_output" | "custom_tool_call_output":
            text = _text_if_only_text(item["output"])
            return item["output"] if text is None else text
    return result_text(item)


def _add_message(chat: ChatMessages, item: Item, path: str) -> None:
    """Add a message. Consecutive messages of the assistant become one message, and so do
    consecutive system messages that have only text: many chat templates refuse consecutive messages
    of these roles."""
    role, content = item["role"], item["content"]
    last = _last_message(chat)
    if role == "assistant":
        text = _assistant_text(content)
        if last["role"] == "assistant" and "tool_calls" not in last:
            texts = [each for each in (last["content"], text) if each]
            chat.messages[-1] = {**last, "content": join_texts(texts)}
        else:
            _append_message(chat, {"role": role, "content": text}, path)
        return
    text_only = _text_if_only_text(content)
    are_both_text = text_only is not None and isinstance(last.get("content"), str)
    if are_both_text and role in _SYSTEM and last["role"] in _SYSTEM:
        chat.messages[-1] = {**last, "content": f"{last['content']}\n\n{text_only}"}
        return
    _append_message(
        chat, {"role": role, "content": content if text_only is None else text_only}, path
    )


def _add_call(chat: ChatMessages, call: dict[str, Any], path: str) -> None:
    """Add a call to the last message if that is the assistant's, else to a new message."""
    last = _last_message(chat)
    if last["role"] == "assistant":
        chat.messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    else:
        _append_message(chat, {"role": "assistant", "content": None, "tool_calls": [call]}, path)


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    if item["type"] in ("function_call", "custom_tool_call"):
        function = {"name": function_name(item), "arguments": function_arguments(item)}
    else:
        name = item["type"].removesuffix("_call")
        function = {"name": name, "arguments": call_arguments(item)}
    return {"id": item["call_id"], "type": "function", "function": function}


def _assistant_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the assistant's text, or its refusal."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _text_if_only_text(content: str | Sequence[Mapping[str, Any]]) -> str | None:
    """Return content that is all text as a string, because not every backend accepts a list of
    parts. Return None if a part is not text."""
    if isinstance(content, str):
        return content
    if any(part.get("type") not in ("input_text", "text", "output_text") for part in content):
        return None
    return "\n".join(part["text"] or "" for part in content)
