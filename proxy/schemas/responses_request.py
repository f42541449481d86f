"""POST /v1/responses: the request as the chat completion that asks for the same.

responses_shapes checks the fields, and responses_tools translates the tools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.history import is_step_id, one_text
from proxy.errors import NotFoundError, ProxyError
from proxy.schemas.responses_shapes import PASSED_OVER, check_fields, item_type
from proxy.schemas.responses_tools import (
    SEARCH,
    AskedTools,
    asked_tools,
    call_arguments,
    chat_choice,
    function_name,
    loaded_tools,
    result_text,
    search_result,
    tool_first,
    written_arguments,
)

_TRANSLATED = frozenset(
    {
        *("input", "instructions", "tools", "tool_choice", "max_tool_calls", "text", "reasoning"),
        *("max_output_tokens", "include", "stream_options", "truncation", "background", "store"),
        *("previous_response_id", "conversation", "sandbox"),
        *("access_programs", "background_options", "image"),
    }
)
"""Fields that a chat completion has under another name, or not at all."""
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponsesAsChat:
    """A request as a chat completion."""

    chat: Mapping[str, Any]
    tools: AskedTools
    names: Mapping[str, str]
    """Paths in `chat`, and the paths of the same values in the request."""
    tool_first: bool = False
    """Whether the run must begin with a tool call, which may be one of the sandbox's."""

    def translate_error(self, error: ProxyError) -> ProxyError:
        """Return an error with the path of the client's request instead of the path in `chat`."""
        param = error.param or ""
        for place, own in self.names.items():
            if param == place or param.startswith((f"{place}.", f"{place}[")):
                error.param = own + param.removeprefix(place)
                error.message = error.message.replace(f"'{place}", f"'{own}")
                return error
        return error


def as_chat(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()) -> ResponsesAsChat:
    """Return the chat completion for a request that continues `earlier` items.

    Raises BadRequestError, and NotFoundError for a reference to an unknown item.
    """
    check_fields(body)
    items = body["input"] if isinstance(body["input"], list) else []
    tools = asked_tools(body.get("tools") or [], loaded_tools([*earlier, *items]))
    talk = _to_chat_messages(body.get("instructions"), body["input"], earlier)
    names: dict[str, str] = {}
    for index, (message, place) in enumerate(zip(talk.messages, talk.places, strict=True)):
        if message["role"] == "tool":
            names[f"messages[{index}].content"] = f"{place}.output"
        names[f"messages[{index}]"] = place
    ours = dict(body.get("sandbox") or {})
    before = ours.get("file_ids") or []
    if tools.files and isinstance(before, list):
        ours["file_ids"] = [*before, *(file_id for _, file_id in tools.files)]
        for index, (param, _) in enumerate(tools.files, len(before)):
            names[f"sandbox.file_ids[{index}]"] = param
    if tools.container_id and not ours.get("container_id"):
        ours["container_id"] = tools.container_id
    carried = {key: value for key, value in body.items() if key not in _TRANSLATED}
    placed = _renamed(body, tools)
    given = {key: value for key, value in placed.items() if value is not None}
    whole = {**carried, **given, "messages": talk.messages, "sandbox": ours}
    first = tool_first(body.get("tool_choice"), tools)
    return ResponsesAsChat(whole, tools, {**names, **_NAMES}, first)


_NAMES = {
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


def wants(body: Mapping[str, Any], what: str) -> bool:
    """Return True if `include` names a field."""
    return what in (body.get("include") or [])


def _renamed(body: Mapping[str, Any], tools: AskedTools) -> dict[str, Any]:
    """Return the fields that a chat completion has under another name; None for absent ones."""
    settings = body.get("text") or {}
    wants_logprobs = wants(body, LOGPROBS) or body.get("top_logprobs")
    return {
        "tools": list(tools.functions) or None,
        "tool_choice": chat_choice(body.get("tool_choice"), tools),
        "response_format": _response_format(settings.get("format")),
        "verbosity": settings.get("verbosity"),
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "max_completion_tokens": body.get("max_output_tokens"),
        "logprobs": True if wants_logprobs else None,
    }


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form["type"] != "json_schema":
        return dict(form)
    named = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": named}


# Input

Item = dict[str, Any]
_SAYS_NOTHING = ("rs_", "sh_", "sho_", "ci_")
"""Prefixes of ids of items that the model does not see again; they need not be found."""
_SYSTEM = ("system", "developer")
_FUNCTION_CALLS = ("function_call", "custom_tool_call")
_BUILT_IN = {
    "shell_call": "shell",
    "local_shell_call": "local_shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": SEARCH,
}
"""Types of calls of OpenAI's tools, and the names of their functions."""
_RESULTS = ("shell_call_output", "local_shell_call_output", "apply_patch_call_output")


@dataclass(frozen=True, slots=True)
class _ChatMessages:
    """The messages of a chat completion, each with the path of its item in the request."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.places.append(place)


def _to_chat_messages(
    instructions: str | None, given: str | Sequence[Item], before: Sequence[Mapping[str, Any]]
) -> _ChatMessages:
    """Return checked instructions and input, after the items `before`, as chat messages.

    Raises NotFoundError for a reference to an unknown item.
    """
    chat = _ChatMessages()
    if instructions:
        chat.add({"role": "system", "content": instructions}, "instructions")
    for item in before:
        _tell(chat, dict(item), "input")
    if isinstance(given, str):
        chat.add({"role": "user", "content": given}, "input")
        return _alternating(chat)
    for index, item in enumerate(given):
        _tell(chat, item, f"input[{index}]")
    return _alternating(chat)


def _alternating(chat: _ChatMessages) -> _ChatMessages:
    """Return the messages with consecutive messages of the assistant as one, such as narration and
    answer: many chat templates require alternating roles."""
    together: list[list[dict[str, Any]]] = []
    places: list[str] = []
    for message, place in zip(chat.messages, chat.places, strict=True):
        before = together[-1][-1] if together else {}
        if message["role"] == before.get("role") == "assistant" and "tool_calls" not in before:
            together[-1].append(message)
        else:
            together.append([message])
            places.append(place)
    return _ChatMessages([_as_one(messages) for messages in together], places)


def _as_one(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(messages) == 1:
        return messages[0]
    said = [message["content"] for message in messages if message["content"]]
    return {**messages[-1], "content": one_text(said)}


def input_items(given: str | Sequence[Item], run_id: str) -> list[Item]:
    """Return the input as items with ids; a string becomes a message."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_with_id(item, f"{run_id}_in{index}") for index, item in enumerate(items)]


def _with_id(item: Item, name: str) -> Item:
    kind = item_type(item)
    given = (item.get("id") or "").encode(errors="replace").decode()  # as the store will have it
    identified = {**item, "type": kind, "id": given or f"{_PREFIX.get(kind, kind)}_{name}"}
    if kind == "message" and isinstance(item["content"], str):
        written = "output_text" if item["role"] == "assistant" else "input_text"
        part: Item = {"type": written, "text": item["content"]}
        if written == "output_text":
            part |= {"annotations": [], "logprobs": []}
        identified["content"] = [part]
    return {"status": "completed", **identified} if kind in _PREFIX else identified


_PREFIX = {
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


def _tell(chat: _ChatMessages, item: Item, place: str) -> None:
    kind = item_type(item)
    if kind in PASSED_OVER or _is_a_servers(item):
        return
    if kind == "item_reference" and item["id"].startswith(_SAYS_NOTHING):
        return
    if kind == "item_reference":
        raise NotFoundError(f"Item with id '{item['id']}' not found.", param="input")
    if kind == "message":
        _tell_message(chat, item, place)
    elif kind in _FUNCTION_CALLS or kind in _BUILT_IN:
        _tell_call(chat, _call(item), place)
    else:
        call_id = item["id"] if item.get("call_id") is None else item["call_id"]
        chat.add({"role": "tool", "tool_call_id": call_id, "content": _result(item)}, place)


def _is_a_servers(item: Item) -> bool:
    """Return True for the call or result of a tool that a server ran: the model does not see it
    again."""
    kind = item_type(item)
    if kind in ("tool_search_call", "tool_search_output"):
        return item.get("call_id") is None
    if kind in ("shell_call", "shell_call_output"):
        where = item.get("environment") or {}
        return is_step_id(item["call_id"]) or where.get("type") == "container_reference"
    return False


def _result(item: Item) -> Any:
    if item["type"] == "tool_search_output":
        return search_result(item["tools"])
    if item["type"] in _RESULTS:
        return result_text(item)
    words = _words(item["output"])
    return item["output"] if words is None else words


def _tell_message(chat: _ChatMessages, item: Item, place: str) -> None:
    role, content = item["role"], item["content"]
    if role == "assistant":
        chat.add({"role": role, "content": _said(content)}, place)
        return
    words = _words(content)
    before = chat.messages[-1] if chat.messages else {}
    said_before = before.get("content") if before.get("role") in _SYSTEM else None
    if role in _SYSTEM and words is not None and isinstance(said_before, str):
        # Many chat templates refuse a second system message.
        chat.messages[-1] = {**before, "content": f"{said_before}\n\n{words}"}
        return
    chat.add({"role": role, "content": content if words is None else words}, place)


def _tell_call(chat: _ChatMessages, call: dict[str, Any], place: str) -> None:
    """Add a call to the message of its turn, or to a new one."""
    before = chat.messages[-1] if chat.messages else {}
    if before.get("role") == "assistant":
        chat.messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", []), call]}
    else:
        chat.add({"role": "assistant", "content": None, "tool_calls": [call]}, place)


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    if name := _BUILT_IN.get(item["type"]):
        function = {"name": name, "arguments": call_arguments(item)}
    else:
        function = {"name": function_name(item), "arguments": written_arguments(item)}
    return {"id": item["call_id"], "type": "function", "function": function}


def _said(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the assistant's text, or its refusal."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _words(content: str | Sequence[Mapping[str, Any]]) -> str | None:
    """Return content that is only text as a string, else None: not every backend accepts lists."""
    if isinstance(content, str):
        return content
    if any(part.get("type") not in ("input_text", "text", "output_text") for part in content):
        return None
    return "\n".join(part["text"] or "" for part in content)
