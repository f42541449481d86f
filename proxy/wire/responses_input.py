"""The input of /v1/responses as the messages of a chat, and where in it each of them stood."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import NotFoundError
from proxy.wire.responses_shapes import PASSED_OVER, item_type

Item = dict[str, Any]
_SAYS_NOTHING = ("rs_", "sh_", "sho_", "ci_")
"""How ids of ours begin that name what no model is told of again: these need not be found."""
_SYSTEM = ("system", "developer")


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
        return chat
    for index, item in enumerate(given):
        _tell(chat, item, f"input[{index}]")
    return chat


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
}


def _tell(chat: Told, item: Item, place: str) -> None:
    kind = item_type(item)
    if kind in PASSED_OVER:
        return
    if kind == "item_reference" and item["id"].startswith(_SAYS_NOTHING):
        return
    if kind == "item_reference":
        raise NotFoundError(f"Item with id '{item['id']}' not found.", param="input")
    if kind == "message":
        _tell_message(chat, item, place)
    elif kind in ("function_call", "custom_tool_call"):
        _tell_call(chat, _call(item), place)
    else:
        words = _words(item["output"])
        content = item["output"] if words is None else words
        chat.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, place)


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
    arguments = item.get("arguments")
    if arguments is None:
        arguments = json.dumps({"input": item["input"]})
    function = {"name": item["name"], "arguments": arguments}
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
