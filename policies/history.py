"""Removes the steps of earlier runs from a client's messages. Steps are the tool calls of a run
that the proxy shows in its answers, and their results; clients send both back.

A model that finds steps in its own earlier messages imitates them instead of calling tools.
"""

import re
from collections.abc import Sequence
from typing import Any

from policies.steps import contains_steps

_STEP_ID = re.compile(r"step_[0-9A-Za-z]+_\d+")
_REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_text", "thinking")
_FILE_FIELDS = frozenset({"annotations", "images"})
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
UNANSWERED = "(I was stopped before I had an answer.)"
"""Replaces an answer that consisted only of steps, so that no user message follows another user
message."""

Message = dict[str, Any]


def step_id(run_id: str, step: int) -> str:
    """Return the tool call id of a step. No other tool call has an id of this form."""
    return f"step_{run_id}_{step}"


def strip_steps(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without steps.

    Tool calls that were steps and their results are removed, even if a client dropped one of the
    two. Reasoning that contains steps is removed entirely: backends drop the reasoning of earlier
    turns anyway. The fields of assistant messages that list files are removed, too. Messages that
    the removal leaves side by side are merged or separated, so that roles still alternate.
    """
    groups: list[list[Message]] = []
    follows_steps = False
    for message in map(_without_files, messages):
        stripped = _without_steps(message)
        if stripped is not None and follows_steps:
            _append_to_groups(groups, stripped)
        elif stripped is not None:
            groups.append([stripped])
        follows_steps = stripped is not message
    return [_merge_messages(group) for group in groups]


def _without_files(message: Message) -> Message:
    """Return the message without the fields that list its files. Models do not read these fields,
    and some backends refuse them."""
    if message.get("role") != "assistant" or not (_FILE_FIELDS & message.keys()):
        return message
    return {key: value for key, value in message.items() if key not in _FILE_FIELDS}


def _without_steps(message: Message) -> Message | None:
    """Return the message without steps, or None if nothing is left of it."""
    role = message.get("role")
    if role == "tool":
        return None if is_step_id(message.get("tool_call_id")) else message
    if role != "assistant":
        return message
    return _without_calls(_without_reasoning(message))


def _without_calls(message: Message) -> Message | None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    others = [call for call in calls if not (isinstance(call, dict) and is_step_id(call.get("id")))]
    if len(others) == len(calls):
        return message
    if others:
        return {**message, "tool_calls": others}
    if not message.get("content"):
        return None
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _without_reasoning(message: Message) -> Message:
    removed = [key for key in _REASONING_FIELDS if _has_steps(message.get(key))]
    content = message.get("content")
    stripped = (
        _strip_steps_from_parts(content)
        if isinstance(content, list)
        else _strip_think_blocks(content)
    )
    if not removed and stripped is content:
        return message
    kept = {key: value for key, value in message.items() if key not in removed}
    return {**kept, "content": stripped} if "content" in message else kept


def _has_steps(reasoning: Any) -> bool:
    """Return True if reasoning, which is a text or an object with texts, contains steps."""
    texts = reasoning.values() if isinstance(reasoning, dict) else [reasoning]
    return any(isinstance(text, str) and contains_steps(text) for text in texts)


def _strip_steps_from_parts(parts: list[Any]) -> list[Any] | str:
    """Remove the reasoning that contains steps. Return `parts` itself if there is no such
    reasoning, and "" if nothing is left."""
    kept: list[Any] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kept += [] if isinstance(part, dict) and _has_steps(part) else [part]
        elif (text := _strip_think_blocks(part.get("text"))) is part.get("text"):
            kept.append(part)
        elif text:
            kept.append({**part, "text": text})
    return parts if kept == parts else kept or ""


def _strip_think_blocks(content: Any) -> Any:
    """Return content without `<think>` blocks that contain steps; `content` itself if there are no
    such blocks."""
    if not isinstance(content, str) or _THINK_OPEN not in content:
        return content
    *blocks, rest = content.split(_THINK_CLOSE)  # a regular expression would take quadratic time
    kept: list[str] = []
    was_removed = False
    for block in blocks:
        before, opening, reasoning = (block.lstrip() if was_removed else block).partition(
            _THINK_OPEN
        )
        was_removed = bool(opening) and contains_steps(reasoning)
        kept += [before] if was_removed else [before, opening, reasoning, _THINK_CLOSE]
    text = "".join([*kept, rest.lstrip() if was_removed else rest])
    return content if text == content else text


def is_step_id(call_id: object) -> bool:
    """Return True if a tool call id from a client is the id of a step."""
    return isinstance(call_id, str) and _STEP_ID.fullmatch(call_id) is not None


def _append_to_groups(groups: list[list[Message]], message: Message) -> None:
    """Append a message that follows removed steps. A message that must be merged with the previous
    message is added to the last group, any other message becomes a new group. UNANSWERED separates
    two user messages."""
    before = groups[-1][-1] if groups else {}
    roles = (before.get("role"), message.get("role"))
    if roles == ("assistant", "assistant") and not before.get("tool_calls"):
        groups[-1].append(message)
        return
    if roles == ("user", "user"):
        groups.append([{"role": "assistant", "content": UNANSWERED}])
    groups.append([message])


def _merge_messages(messages: Sequence[Message]) -> Message:
    """Merge all messages at once, and return the merged message. Merging them in pairs would take
    quadratic time."""
    if len(messages) == 1:
        return messages[0]
    merged: Message = {}
    for message in messages:
        merged |= message
    contents = [content for message in messages if (content := message.get("content"))]
    if len(contents) < 2:
        content = contents[0] if contents else messages[-1].get("content")
    elif all(isinstance(content, str) for content in contents):
        content = join_texts(contents)
    else:
        content = [part for content in contents for part in _content_parts(content)]
    return {**merged, "content": content}


def join_texts(texts: Sequence[str]) -> str:
    """Join texts with an empty line between them."""
    return "\n\n".join([*(text.rstrip("\n") for text in texts[:-1]), *texts[-1:]])


def _content_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
