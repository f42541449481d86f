"""What a client sends back of our own: steps it was shown are no part of what was said.

A model that finds them among its own words begins to imitate them instead of calling tools.
"""

import re
from collections.abc import Sequence
from typing import Any

from policies.steps import tells_steps

_STEP_ID = re.compile(r"step_[0-9A-Za-z]+_\d+")
_THINKING_FIELDS = ("reasoning", "reasoning_content", "reasoning_text", "thinking")
_OPEN, _CLOSE = "<think>", "</think>"
UNANSWERED = "(I was stopped before I had an answer.)"
"""Stands where nothing but steps stood, so that two users' turns do not meet."""

Message = dict[str, Any]


def step_id(run_id: str, step: int) -> str:
    """The id under which a client is shown a call; no model's and no client's call has such."""
    return f"step_{run_id}_{step}"


def without_steps(messages: Sequence[Message]) -> list[Message]:
    """The messages as they were before we showed our steps; all else stays as it is.

    Our calls and their results go, also where a client dropped one of the two. Thinking that tells
    of steps goes whole: backends leave out the thinking of earlier turns anyway.
    """
    kept: list[Message] = []
    seam = False
    for message in messages:
        cleaned = _cleaned(message)
        if cleaned is not None and seam:
            _join(kept, cleaned)
        elif cleaned is not None:
            kept.append(cleaned)
        seam = cleaned is not message
    return kept


def _cleaned(message: Message) -> Message | None:
    """The message without what is ours; None where nothing else is in it."""
    role = message.get("role")
    if role == "tool":
        return None if _is_ours(message.get("tool_call_id")) else message
    if role != "assistant":
        return message
    return _without_calls(_without_thinking(message))


def _without_calls(message: Message) -> Message | None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    theirs = [call for call in calls if not (isinstance(call, dict) and _is_ours(call.get("id")))]
    if len(theirs) == len(calls):
        return message
    if theirs:
        return {**message, "tool_calls": theirs}
    if not message.get("content"):
        return None
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _without_thinking(message: Message) -> Message:
    ours = [
        key
        for key in _THINKING_FIELDS
        if isinstance(message.get(key), str) and tells_steps(message[key])
    ]
    content = message.get("content")
    shown = _without_thoughts(content)
    if not ours and shown is content:
        return message
    kept = {key: value for key, value in message.items() if key not in ours}
    return {**kept, "content": shown} if "content" in message else kept


def _without_thoughts(content: Any) -> Any:
    """Content without the `<think>` blocks that tell of steps; the same object where none does."""
    if not isinstance(content, str) or _OPEN not in content:
        return content
    *blocks, rest = content.split(_CLOSE)  # a regular expression would take quadratic time
    shown: list[str] = []
    was_ours = False
    for block in blocks:
        before, opened, thought = (block.lstrip() if was_ours else block).partition(_OPEN)
        was_ours = bool(opened) and tells_steps(thought)
        shown += [before] if was_ours else [before, opened, thought, _CLOSE]
    text = "".join([*shown, rest.lstrip() if was_ours else rest])
    return content if text == content else text


def _is_ours(call_id: object) -> bool:
    return isinstance(call_id, str) and _STEP_ID.fullmatch(call_id) is not None


def _join(kept: list[Message], message: Message) -> None:
    """Add what follows the place where steps stood, so that the roles still alternate."""
    before = kept[-1] if kept else {}
    roles = (before.get("role"), message.get("role"))
    if roles == ("assistant", "assistant") and not before.get("tool_calls"):
        content = _both(before.get("content"), message.get("content"))
        kept[-1] = {**before, **message, "content": content}
        return
    if roles == ("user", "user"):
        kept.append({"role": "assistant", "content": UNANSWERED})
    kept.append(message)


def _both(first: Any, second: Any) -> Any:
    if not (first and second):
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
