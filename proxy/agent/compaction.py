"""Making room in the context: old observations become stubs, and where that is not enough, a
summary takes the place of what was said. Each begins a new segment of the history."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.context import EASED_SHARE, SUMMARY_SHARE
from policies.observation import is_worth_a_stub, stub
from policies.prompts import sum_up_request, summary_words
from policies.thinking import spoken
from proxy.agent.gauge import Gauge
from proxy.agent.history import Entry, History, text_of
from proxy.agent.model import Message, Reply
from proxy.agent.observation_files import ObservationFiles
from proxy.agent.task import Compaction
from proxy.errors import BackendError, ContextOverflowError

_LOG = logging.getLogger(__name__)
WORTH_TOKENS = 400
"""What a summary takes at least; less than twice as much is not summed up."""
MAX_SUMMARY_TOKENS = 2000
SUMMARY_PART = 8
"""A summary takes at most this part (1/8) of the prompt."""
MAX_ASKED = 4
"""How often a summary is asked for, each time of half as much, where that does not fit."""
MIN_SHOWN_CHARS = 200
"""Of each message in a transcript."""
MAX_CHARS_A_TOKEN = 6
Cause = Literal["nearly full", "refused"]


@dataclass(frozen=True, slots=True)
class Need:
    """How much room must be made."""

    cause: Cause
    limit: int
    """Tokens that the prompt may have."""
    before: int
    """Those that it has."""


Ask = Callable[[Sequence[Message]], Awaitable[Reply | None]]


class Compactor:
    """Of one run."""

    def __init__(self, history: History, gauge: Gauge, files: ObservationFiles, ask: Ask) -> None:
        """`ask` has the model answer without tools, if it may. Raises BackendError."""
        self._history = history
        self._gauge = gauge
        self._files = files
        self._ask = ask
        self._gave_up = False
        self.done: list[Compaction] = []

    async def make_room(self, need: Need) -> bool:
        """Make the history smaller; False, where nothing is left that could be."""
        after = await self._shorten(need)
        is_smaller = after < need.before
        lasts = after <= need.limit * (1 + EASED_SHARE) / 2 or any(self._long_observations())
        if after <= need.limit and lasts:
            return is_smaller
        # With stubs alone the next turn would be here again.
        return await self._sum_up(need) or is_smaller

    async def _shorten(self, need: Need) -> int:
        """Make stubs of observations, the oldest first, until it is eased; gives its tokens. Those
        that the model has not read yet are spared where they fit."""
        stubs: dict[int, str] = {}
        tokens = need.before
        said = [n for n, entry in enumerate(self._history.entries) if entry.kind == "said"]
        unread_from = max(said, default=0)
        for n, entry in self._long_observations():
            if tokens <= need.limit * (1 if n > unread_from else EASED_SHARE):
                break
            text = text_of(entry.message)
            stubs[n] = stub(text, await self._files.keep(text))
            shorter = {**entry.message, "content": stubs[n]}
            tokens -= self._gauge.estimate([entry.message]) - self._gauge.estimate([shorter])
        if stubs:
            self._history.shorten(stubs)
            self._note("stubs", need, tokens)
        return tokens

    def _long_observations(self) -> list[tuple[int, Entry]]:
        return [
            (n, entry)
            for n, entry in enumerate(self._history.entries)
            if entry.kind == "observed"
            and isinstance(entry.message.get("content"), str)
            and is_worth_a_stub(entry.message["content"])
        ]

    async def _sum_up(self, need: Need) -> bool:
        turns = self._history.turns()
        allowed = min(MAX_SUMMARY_TOKENS, need.limit // SUMMARY_PART)
        latest = self._latest(turns, round(need.limit * SUMMARY_SHARE) - allowed)
        gone = [e.message for turn in turns[: len(turns) - len(latest)] for e in turn]
        if self._gave_up or self._gauge.estimate(gone) < 2 * WORTH_TOKENS:
            return False
        summary = await self._summary(allowed, need.limit)
        if not summary:
            self._gave_up = summary is not None
            return False
        self._history.sum_up(summary_words(summary), latest)
        self._note("summary", need, self._gauge.tokens(self._history.messages))
        return True

    def _latest(self, turns: Sequence[Sequence[Entry]], room: int) -> Sequence[Sequence[Entry]]:
        """The last turns that fit beside the client's messages. What the client's tools have given
        at last is among them in any case: nobody has read it yet."""
        entries = self._history.entries
        theirs = [entry.message for entry in entries if entry.kind == "theirs"]
        tokens, count = self._gauge.tokens(theirs), 0
        for turn in reversed(turns):
            tokens += self._gauge.estimate([e.message for e in turn if e.kind != "theirs"])
            if tokens > room:
                break
            count += 1
        if turns and any(entry.kind == "result" for entry in turns[-1]):
            count = max(count, 1)
        return turns[len(turns) - count :]

    async def _summary(self, allowed: int, limit: int) -> str | None:
        """The model's, of all it was told; where that does not fit, of less and less of it. None,
        where it may be had another time."""
        request: Message = {"role": "user", "content": sum_up_request(allowed)}
        told = list(self._history.entries)
        if told[-1].kind == "asked":
            told.pop()  # what it asks for comes after the summary
        messages = [entry.message for entry in told]
        tokens = limit
        for _ in range(MAX_ASKED):
            try:
                reply = await self._ask([*messages, request])
            except ContextOverflowError:
                tokens //= 2
                messages = transcript(told, self._gauge.chars(tokens))
                continue
            except BackendError as error:
                _LOG.warning("no summary of a full context: %s", error)
                return None
            if reply is None:
                return None
            return spoken(text_of(reply.message))[: allowed * MAX_CHARS_A_TOKEN]
        return ""

    def _note(self, kind: Literal["stubs", "summary"], need: Need, after: int) -> None:
        self.done.append(Compaction(kind, need.cause, need.before, after))
        _LOG.info("context %s: %s, %d to %d tokens", need.cause, kind, need.before, after)


def transcript(entries: Sequence[Entry], chars: int) -> list[Message]:
    """The client's messages, and in one more what was said since, cut to about so many characters:
    each message to the same length, and of them all the latest."""
    theirs = [entry.message for entry in entries if entry.kind == "theirs"]
    ours = [entry.message for entry in entries if entry.kind != "theirs"]
    shown = max(MIN_SHOWN_CHARS, chars // max(1, len(ours)))
    lines = [f"{each['role']}: {_cut(_spoken(each), shown)}" for each in ours]
    return [*theirs, {"role": "user", "content": "\n\n".join(lines)[-chars:]}]


def _spoken(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join([text_of(message), *(f"{c['name']} {c['arguments']}" for c in calls)]).strip()


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars // 2]} [...] {text[-chars // 2 :]}"
