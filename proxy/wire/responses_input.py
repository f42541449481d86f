"""The input of /v1/responses as the messages of a chat, and where in it each of them stood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.history import is_step_id, one_text
from proxy.errors import NotFoundError
from proxy.wire.responses_builtin import SEARCH, call_arguments, result_text
from proxy.wire.responses_functions import found, function_name, written_arguments
from proxy.wire.responses_shapes import PASSED_OVER, item_type

Item = dict[str, Any]
_SAYS_NOTHING = ("rs_", "sh_", "sho_", "ci_")
"""How ids of ours begin that name what no model is told of again: these need not be found."""
_SYSTEM = ("system", "developer")
_FUNCTION_CALLS = ("function_call", "custom_tool_call")
_BUILT_IN = {
    "shell_call": "shell",
    "local_shell_call": "local_shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": SEARCH,
}
"""Calls of tools that have no name of the client's, and what the model calls these."""
_RESULTS = ("shell_call_output", "local_shell_call_output", "apply_patch_call_output")


@dataclass(frozen=True, slots=True)
class Told:
    """The messages, and of each the name that errors have for its place."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        """What is said next."""
        self.messages.append(message)
        self.places.append(place)


def told(
    instructions: str | None, given: str | Sequence[Item], before: Sequence[Mapping[str, Any]]
) -> Told:
    """The chat that instructions and input are, their shapes being right, and what was before.

    Raises NotFoundError for a reference to an item that is not there.
    """
    chat = Told()
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


def _alternating(chat: Told) -> Told:
    """What an assistant says in several messages, such as narration and answer, is one: many chat
    templates want the roles to alternate."""
    together: list[list[dict[str, Any]]] = []
    places: list[str] = []
    for message, place in zip(chat.messages, chat.places, strict=True):
        before = together[-1][-1] if together else {}
        if message["role"] == before.get("role") == "assistant" and "tool_calls" not in before:
            together[-1].append(message)
        else:
            together.append([message])
            places.append(place)
    return Told([_as_one(messages) for messages in together], places)


def _as_one(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(messages) == 1:
        return messages[0]
    said = [message["content"] for message in messages if message["content"]]
    return {**messages[-1], "content": one_text(said)}


def input_items(given: str | Sequence[Item], run_id: str) -> list[Item]:
    """The input as items that have ids, whichever way it was written."""
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


def _tell(chat: Told, item: Item, place: str) -> None:
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
    """Whether a call or its result is of a tool that a server has run: no model is told of these
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
        return found(item["tools"])
    if item["type"] in _RESULTS:
        return result_text(item)
    words = _words(item["output"])
    return item["output"] if words is None else words


def _tell_message(chat: Told, item: Item, place: str) -> None:
    role, content = item["role"], item["content"]
    if role == "assistant":
        chat.add({"role": role, "content": _said(content)}, place)
        return
    words = _words(content)
    before = chat.messages[-1] if chat.messages else {}
    said_before = before.get("content") if before.get("role") in _SYSTEM else None
    if role in _SYSTEM and words is not None and isinstance(said_before, str):
        # One system message: many chat templates refuse a second.
        chat.messages[-1] = {**before, "content": f"{said_before}\n\n{words}"}
        return
    chat.add({"role": role, "content": content if words is None else words}, place)


def _tell_call(chat: Told, call: dict[str, Any], place: str) -> None:
    """The calls of one turn are one message, with what was said before them."""
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
    """What an assistant said, or how it declined."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _words(content: str | Sequence[Mapping[str, Any]]) -> str | None:
    """The text, where there is nothing else; backends differ in what else they take."""
    if isinstance(content, str):
        return content
    if any(part.get("type") not in ("input_text", "text", "output_text") for part in content):
        return None
    return "\n".join(part["text"] or "" for part in content)
