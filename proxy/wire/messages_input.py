"""What was said, from Anthropic's messages to those of chat completions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

from policies.history import UNANSWERED, one_text

Block = Mapping[str, Any]
Part = dict[str, Any]
Message = dict[str, Any]
Placed = tuple[str, Block]
"""A block, and the name of its place in the request."""
SYSTEM = "system"
_FROM_SYSTEM = "[From the system:]"
_BILLING = "x-anthropic-billing-header:"
"""Claude Code's word to Anthropic, which differs from chat to chat and would keep each from the
cached beginning of the others."""


@dataclass(slots=True)
class Talk:
    """A conversation as chat completions have it."""

    messages: list[Message] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Where in it something of the client's stands, and what the client calls that place."""

    def add_user(self, parts: Sequence[tuple[str, Part]]) -> None:
        """What the user says next, each part with its place in the request."""
        here = f"messages[{len(self.messages)}]"
        for index, (place, _) in enumerate(parts):
            self.places[f"{here}.content[{index}]"] = place
        self.messages.append({"role": "user", "content": _content([part for _, part in parts])})


def talk_of(system: Any, messages: Sequence[Block]) -> Talk:
    """The conversation, whose shape is right.

    Thinking and what servers did of their own, our steps among it, is left out: a model that finds
    them among its own words imitates them, and backends leave out the thinking of earlier turns.
    """
    talk = Talk()
    first = sum(1 for _ in takewhile(lambda turn: turn["role"] == SYSTEM, messages))
    opening = [
        _words(_blocks(each)) for each in (system, *(t["content"] for t in messages[:first]))
    ]
    if words := "\n\n".join(filter(None, opening)):
        talk.messages.append({"role": SYSTEM, "content": words})
    # Turns of one side that follow each other are one turn to Anthropic.
    numbered = list(enumerate(messages))[first:]
    for is_assistant, same in groupby(numbered, key=lambda each: each[1]["role"] == "assistant"):
        placed = [each for index, turn in same for each in _of_turn(turn, f"messages[{index}]")]
        if is_assistant:
            talk.messages.append(_assistant(block for _, block in placed))
        else:
            _tell_user(talk, placed)
    return talk


def _of_turn(turn: Block, param: str) -> list[Placed]:
    """The blocks of a turn; what the system says in the midst is told by the user, for many chat
    templates refuse a system message that is not the first."""
    placed = _placed(turn["content"], f"{param}.content")
    if turn["role"] != SYSTEM:
        return placed
    words = (f"{_FROM_SYSTEM}\n{block['text']}" for _, block in placed if block["text"])
    return [(f"{param}.content", _text(each)) for each in words]


def _placed(content: Any, place: str) -> list[Placed]:
    if isinstance(content, str):
        return [(place, _text(content))]
    return [(f"{place}[{index}]", block) for index, block in enumerate(content)]


def _blocks(content: Any) -> list[Block]:
    return [block for _, block in _placed(content or (), "")]


def _words(blocks: Iterable[Block]) -> str:
    texts = (block["text"] for block in blocks)
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _tell_user(talk: Talk, placed: Sequence[Placed]) -> None:
    """Results of tools as messages of their own, and then the rest of the turn."""
    parts: list[tuple[str, Part]] = []
    for place, block in placed:
        if block["type"] != "tool_result":
            continue
        told = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block)}
        talk.messages.append(told)
        parts += [(place, part) for part in _shown_by(block)]
    for place, block in placed:
        if block["type"] != "tool_result":
            parts += [(place, part) for part in _parts(block)]
    if parts:
        talk.add_user(parts)


def _content(parts: list[Part]) -> str | list[Part]:
    """A string where it is words alone: many chat templates know no other content."""
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
    """What a tool gave beside words: backends take that from the user alone."""
    parts = [part for each in _blocks(block.get("content")) for part in _parts(each)]
    shown = [part for part in parts if part["type"] != "text"]
    return [_text(f"[From tool call {block['tool_use_id']}:]"), *shown] if shown else []


def _parts(block: Block) -> list[Part]:
    """A block of the user's as parts of content."""
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
    """A file where it is one; words, such as a document may consist of, stay words."""
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
    """Its words and its calls of the client's tools."""
    words: list[str] = []
    calls: list[dict[str, Any]] = []
    for kind, alike in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":  # what citations have divided is one text
            words.append("".join(block["text"] for block in alike))
        elif kind == "compaction":  # stands for all that was before
            words += [block["content"] for block in alike if block.get("content")]
        elif kind == "tool_use":
            calls += map(_call, alike)
    content = one_text(list(filter(None, words)))
    if calls:
        return {"role": "assistant", "content": content or None, "tool_calls": calls}
    return {"role": "assistant", "content": content or UNANSWERED}


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}
