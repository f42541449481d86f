"""Collects a reply piece by piece, so that a reply that is cut off is kept and counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policies.prices import expected_tokens
from proxy.agent.events import (
    CallFailed,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    TokenCount,
    ToolCallDelta,
)
from proxy.agent.model import Message, Reply, ReplyStopped

LONG_PIECE_CHARS = 12
"""Engines send a token a piece; pieces longer than this on average hold several."""
CHARS_PER_TOKEN = 4


class PartialReply:
    """The pieces of one reply that have arrived so far."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """`messages` are those it replies to."""
        self._messages = messages
        self._text: list[TextDelta] = []
        self._thinking: list[str] = []
        self._pieces = 0
        self._chars = 0
        self._count: TokenCount | None = None
        self._counted_pieces = 0
        """How many had come when the engine told that count."""

    def heard_by(self, hear: OnDelta) -> OnDelta:
        """Return a listener that notes each piece before `hear` does."""

        async def note_and_hear(delta: ModelDelta) -> None:
            self._note(delta)
            await hear(delta)

        return note_and_hear

    @property
    def has_begun(self) -> bool:
        """True once the model has generated something."""
        return self._pieces > 0

    def reply(self, stopped: ReplyStopped | None = None) -> Reply:
        """Return what has come so far, cut off for the cause that `stopped` tells, or by the end
        of the time or the connection. Unfinished tool calls are left out."""
        thinking = "".join(self._thinking)
        text = "".join(delta.text for delta in self._text)
        if stopped is not None and stopped.stop:
            text = text.partition(stopped.stop)[0]
        message: Message = {"role": "assistant", "content": text}
        if thinking:
            message |= {"reasoning": thinking, "reasoning_content": thinking}
        if stopped is not None and stopped.cause == "many_calls" and stopped.reply:
            return self._with_calls(stopped.reply)
        ends_by_itself = stopped is not None and stopped.cause in ("stop", "no_call")
        sent = stopped.reply if stopped else None
        return Reply(
            message=message,
            finish_reason="stop" if ends_by_itself else "length",
            usage=self._usage(),
            choice={**(sent.choice if sent else {}), **self._choice(stopped)},
            response=sent.response if sent else {},
            stopped=stopped.cause if stopped else None,
        )

    def _with_calls(self, sent: Reply) -> Reply:
        """Return a reply that was ended for its many calls, with those that are complete and one
        more, which tells that there were more."""
        return replace(sent, usage=self._usage(), stopped="many_calls")

    def _note(self, delta: ModelDelta) -> None:
        match delta:
            case TextDelta(text):
                self._text.append(delta)
                self._add(text)
            case ReasoningDelta(text):
                self._thinking.append(text)
                self._add(text)
            case ToolCallDelta(arguments=text):
                self._add(text)
            case TokenCount():
                self._count, self._counted_pieces = delta, self._pieces
            case CallFailed():  # what it has generated counts all the same
                self._text.clear()
                self._thinking.clear()

    def _add(self, text: str) -> None:
        self._pieces += 1
        self._chars += len(text)

    def _usage(self) -> dict[str, Any]:
        """The engine's running count, or an estimate, which says so."""
        if self._count is not None:
            prompt = self._count.prompt
            completion = self._count.completion + self._pieces - self._counted_pieces
        else:
            prompt = expected_tokens(self._messages)
            completion = estimated_tokens(self._pieces, self._chars)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return usage if self._count is not None else {**usage, "estimated": True}

    def _choice(self, stopped: ReplyStopped | None) -> dict[str, Any]:
        found = [d.logprobs["content"] for d in self._text if _has_logprobs(d)]
        choice: dict[str, Any] = {}
        if found:
            choice["logprobs"] = {"content": [token for tokens in found for token in tokens]}
        if stopped is not None and stopped.stop is not None:
            choice["stop_reason"] = stopped.stop
        return choice


def estimated_tokens(pieces: int, chars: int) -> int:
    """Return an estimate of the tokens in so many pieces of text: one a piece, more where the
    pieces are long."""
    if chars <= LONG_PIECE_CHARS * pieces:
        return pieces
    return max(pieces, chars // CHARS_PER_TOKEN)


def _has_logprobs(delta: TextDelta) -> bool:
    return isinstance(delta.logprobs, dict) and isinstance(delta.logprobs.get("content"), list)
