"""Removes from a client's messages what the proxy added to earlier answers: the steps of runs.

A model that finds steps among its own words begins to imitate them instead of calling tools.
"""

import re
from collections.abc import Sequence
from typing import Any

from policies.steps import contains_steps

_STEP_ID = re.compile(r"step_[0-9A-Za-z]+_\d+")
_THINKING_FIELDS = ("reasoning", "reasoning_content", "reasoning_text", "thinking")
_BESIDE = frozenset({"annotations", "images"})
_OPEN, _CLOSE = "<think>", "</think>"
UNANSWERED = "(I was stopped before I had an answer.)"
"""Takes the place of an answer that was nothing but steps, so that two turns of the user do not
follow each other."""

Message = dict[str, Any]


def step_id(run_id: str, step: int) -> str:
    """Return the id under which a client is shown a step; no other call has such an id."""
    return f"step_{run_id}_{step}"


def strip_steps(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without steps, and otherwise unchanged.

    Calls that were steps and their results go, even if a client dropped one of the two. Thinking
    that contains steps goes as a whole: backends leave out the thinking of earlier turns anyway.
    """
    kept: list[list[Message]] = []
    seam = False
    for message in map(_without_files, messages):
        cleaned = _strip_message(message)
        if cleaned is not None and seam:
            _join(kept, cleaned)
        elif cleaned is not None:
            kept.append([cleaned])
        seam = cleaned is not message
    return [_merge_messages(joined) for joined in kept]


def _without_files(message: Message) -> Message:
    """Return the message without the fields that told of its files: the model reads none of them,
    and some backends refuse them."""
    if message.get("role") != "assistant" or not (_BESIDE & message.keys()):
        return message
    return {key: value for key, value in message.items() if key not in _BESIDE}


def _strip_message(message: Message) -> Message | None:
    """Return the message without steps, or None if nothing else is in it."""
    role = message.get("role")
    if role == "tool":
        return None if is_step_id(message.get("tool_call_id")) else message
    if role != "assistant":
        return message
    return _without_calls(_without_thinking(message))


def _without_calls(message: Message) -> Message | None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    theirs = [call for call in calls if not (isinstance(call, dict) and is_step_id(call.get("id")))]
    if len(theirs) == len(calls):
        return message
    if theirs:
        return {**message, "tool_calls": theirs}
    if not message.get("content"):
        return None
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _without_thinking(message: Message) -> Message:
    ours = [key for key in _THINKING_FIELDS if _tells_steps(message.get(key))]
    content = message.get("content")
    shown = _shown_parts(content) if isinstance(content, list) else _without_thoughts(content)
    if not ours and shown is content:
        return message
    kept = {key: value for key, value in message.items() if key not in ours}
    return {**kept, "content": shown} if "content" in message else kept


def _tells_steps(thinking: Any) -> bool:
    """Return True if thinking contains steps; it is a text, or an object with one."""
    texts = thinking.values() if isinstance(thinking, dict) else [thinking]
    return any(isinstance(text, str) and contains_steps(text) for text in texts)


def _shown_parts(parts: list[Any]) -> list[Any] | str:
    """Return the parts without thinking that contains steps; the same object if there is none."""
    shown: list[Any] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            shown += [] if isinstance(part, dict) and _tells_steps(part) else [part]
        elif (text := _without_thoughts(part.get("text"))) is part.get("text"):
            shown.append(part)
        elif text:
            shown.append({**part, "text": text})
    return parts if shown == parts else shown or ""


def _without_thoughts(content: Any) -> Any:
    """Return content without `<think>` blocks that contain steps; the same object if there are
    none."""
    if not isinstance(content, str) or _OPEN not in content:
        return content
    *blocks, rest = content.split(_CLOSE)  # a regular expression would take quadratic time
    shown: list[str] = []
    was_ours = False
    for block in blocks:
        before, opened, thought = (block.lstrip() if was_ours else block).partition(_OPEN)
        was_ours = bool(opened) and contains_steps(thought)
        shown += [before] if was_ours else [before, opened, thought, _CLOSE]
    text = "".join([*shown, rest.lstrip() if was_ours else rest])
    return content if text == content else text


def is_step_id(call_id: object) -> bool:
    """Return True if a call that a client sent is a step."""
    return isinstance(call_id, str) and _STEP_ID.fullmatch(call_id) is not None


def _join(kept: list[list[Message]], message: Message) -> None:
    """Add the message after a place where steps were, so that roles still alternate."""
    before = kept[-1][-1] if kept else {}
    roles = (before.get("role"), message.get("role"))
    if roles == ("assistant", "assistant") and not before.get("tool_calls"):
        kept[-1].append(message)
        return
    if roles == ("user", "user"):
        kept.append([{"role": "assistant", "content": UNANSWERED}])
    kept.append([message])


def _merge_messages(messages: Sequence[Message]) -> Message:
    """Join messages that follow each other to one, all at once: piece by piece takes quadratic
    time."""
    if len(messages) == 1:
        return messages[0]
    joined: Message = {}
    for message in messages:
        joined |= message
    said = [content for message in messages if (content := message.get("content"))]
    if len(said) < 2:
        content = said[0] if said else messages[-1].get("content")
    elif all(isinstance(content, str) for content in said):
        content = join_texts(said)
    else:
        content = [part for content in said for part in _parts(content)]
    return {**joined, "content": content}


def join_texts(said: Sequence[str]) -> str:
    """Join texts to one, with an empty line between them."""
    return "\n\n".join([*(text.rstrip("\n") for text in said[:-1]), *said[-1:]])


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
