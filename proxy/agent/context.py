"""Fits a run into its model's context: counts the tokens of the history, lowers the token limit of
a call, and makes the history smaller, first by stubs in place of old observations, then by a
summary. Each of these begins a new segment of the history.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from policies.context import (
    EASED_SHARE,
    PICTURE_BYTES,
    SUMMARY_SHARE,
    TOKENS_PER_BYTE,
    ContextSizes,
    reserved_tokens,
    tokens_per_byte,
)
from policies.observation import is_stub_shorter, stub
from policies.prompts import summary_message, summary_request
from policies.workspace import OBSERVATION_DIR
from proxy.agent.context_windows import ContextWindow
from proxy.agent.history import Entry, History, text_of
from proxy.agent.model import Completion, Message
from proxy.agent.result import Compaction, tokens
from proxy.errors import BackendError, ContextOverflowError
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

_LOG = logging.getLogger(__name__)
TOKEN_LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")
"""A request's token limit under the names that backends have for it."""
MIN_ANSWER_TOKENS = 256
"""A token limit is never made smaller than this to let a prompt in."""
SPARE_TOKENS = 32
SPARE_PART = 32
"""A prompt may be longer by this part (1/32) than is estimated."""
REFUSED_SHARE = 0.9
"""The share that is left of a refused prompt where no better number is known."""
WORTH_TOKENS = 400
"""The least that a summary takes; turns of less than twice as much are not summed up."""
MAX_SUMMARY_TOKENS = 2000
SUMMARY_PART = 8
"""A summary takes at most this part (1/8) of the prompt."""
MAX_ASKED = 4
"""How often a summary is asked for, each time of half as much, if the prompt does not fit."""
MIN_SHOWN_CHARS = 200
"""The least that a transcript shows of each message."""
MAX_CHARS_A_TOKEN = 6
_BESIDE_BYTES = 16
"""The bytes that a chat template writes around a message."""
KEEP_S = 10.0
"""How long writing one observation into the sandbox may take."""
_THINK, _END_THINK = "<think>", "</think>"

Ask = Callable[[Sequence[Message]], Awaitable[Completion | None]]
"""Has the model answer without tools; None if the budget has no room. Raises BackendError."""


class ContextManager:
    """The context of one run: looked at before each call, made smaller if need be."""

    def __init__(
        self,
        window: ContextWindow,
        history: History,
        counter: "TokenCounter",
        files: "ObservationFiles",
        ask: Ask,
        *,
        compacts: bool,
    ) -> None:
        """`compacts`: whether the history may be made smaller."""
        self._compacts = compacts
        self._window = window
        self._history = history
        self._counter = counter
        self._compactor = _Compactor(history, counter, files, ask)
        self._ceiling: int | None = None
        """Fewer tokens than a prompt had that was refused although it seemed to fit."""

    @property
    def known_window(self) -> int | None:
        """The model's window, if it is known without asking."""
        return self._window.known

    @property
    def compactions(self) -> Sequence[Compaction]:
        """How the history was made smaller, in order."""
        return self._compactor.done

    async def fit(self, extra: Mapping[str, Any], *, shortens: bool) -> Mapping[str, Any]:
        """Return the fields of a call, its token limit lowered if need be. If the context is about
        to overflow and `shortens` allows it, the history is made smaller first."""
        if len(self._history.entries) == self._history.ours_from:
            return extra  # the request alone: whether it fits is for the backend to say
        window = await self._window.tokens()
        limit = self._limit(window, extra)
        shortens = shortens and self._compacts
        if shortens and limit is not None and (before := self._tokens()) > limit:
            await self._compactor.make_room(_Overflow("nearly full", limit, before))
        return self._with_token_limit(window, extra)

    async def refit(
        self, extra: Mapping[str, Any], error: ContextOverflowError, *, shortens: bool
    ) -> Mapping[str, Any]:
        """Return the same after the backend refused a call. Raises that error where nothing can be
        made smaller."""
        self._learn(extra, error.sizes)
        window = await self._window.tokens()
        limit, before = self._limit(window, extra), self._tokens()
        if limit is None or before <= limit:
            self._ceiling = limit = int(before * REFUSED_SHARE)
        may_shorten = shortens and self._compacts
        overflow = _Overflow("refused", limit, before)
        is_smaller = may_shorten and await self._compactor.make_room(overflow)
        smaller = self._with_token_limit(window, extra)
        if not is_smaller and smaller == extra:
            raise error
        return smaller

    async def relimit(
        self, extra: Mapping[str, Any], error: ContextOverflowError
    ) -> Mapping[str, Any]:
        """Return the fields of a call whose token limit was lowered after a refusal, lowered
        further if the sizes in the refusal demand it."""
        self._learn(extra, error.sizes)
        return self._with_token_limit(await self._window.tokens(), extra)

    def counted(self, messages: Sequence[Message], reply: Completion) -> None:
        """Note how many tokens the backend counted in these messages and its reply."""
        prompt = tokens(reply.usage, "prompt_tokens")
        answer = tokens(reply.usage, "completion_tokens")
        self._counter.counted(messages, prompt, answer)
        self._window.taken(prompt + answer)

    def _tokens(self) -> int:
        return self._counter.tokens(self._history.messages)

    def _learn(self, extra: Mapping[str, Any], sizes: ContextSizes) -> None:
        """Note the sizes that a refusal told."""
        self._window.refused(sizes)
        if sizes.window is None:
            return
        asked = _token_limit(extra)[1]
        prompt = sizes.prompt or sizes.window - (sizes.answer or asked or 0)
        if prompt > self._tokens():
            self._counter.counted(self._history.messages, prompt, 0)
        if sizes.answer and asked is None and sizes.answer < sizes.window:
            self._ceiling = sizes.window - sizes.answer  # what the backend leaves by itself

    def _limit(self, window: int | None, extra: Mapping[str, Any]) -> int | None:
        """Return how many tokens a prompt may have, as far as is known."""
        limits = (
            [] if window is None else [window - reserved_tokens(window, _token_limit(extra)[1])]
        )
        if self._ceiling is not None:
            limits.append(self._ceiling)
        return min(limits, default=None)

    def _with_token_limit(self, window: int | None, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields with a token limit that fits beside the prompt. The client's limit was
        made for its own prompt; the run's has grown since, and backends refuse what cannot fit."""
        field, asked = _token_limit(extra)
        if window is None or asked is None:
            return extra
        prompt = self._tokens()
        left = window - prompt - SPARE_TOKENS - prompt // SPARE_PART
        return {**extra, field: left} if MIN_ANSWER_TOKENS <= left < asked else extra


def _token_limit(extra: Mapping[str, Any]) -> tuple[str, int | None]:
    found = ((field, extra.get(field)) for field in TOKEN_LIMITS)
    return next(((field, n) for field, n in found if isinstance(n, int)), ("", None))


@dataclass(frozen=True, slots=True)
class _Overflow:
    """A prompt that is too long."""

    cause: Literal["nearly full", "refused"]
    limit: int
    """The tokens that the prompt may have."""
    before: int
    """The tokens that it has."""


class _Compactor:
    """Makes the history of one run smaller."""

    def __init__(
        self, history: History, counter: "TokenCounter", files: "ObservationFiles", ask: Ask
    ) -> None:
        self._history = history
        self._counter = counter
        self._files = files
        self._ask = ask
        self._gave_up = False
        self.done: list[Compaction] = []

    async def make_room(self, overflow: _Overflow) -> bool:
        """Make the history smaller. Return False if nothing is left that could be."""
        after = await self._shorten(overflow)
        is_smaller = after < overflow.before
        lasts = after <= overflow.limit * (1 + EASED_SHARE) / 2 or any(self._long_observations())
        if after <= overflow.limit and lasts:
            return is_smaller
        # With stubs alone the next turn would overflow again.
        return await self._sum_up(overflow) or is_smaller

    async def _shorten(self, overflow: _Overflow) -> int:
        """Replace observations by stubs, the oldest first, until the prompt is eased; return its
        tokens. Observations that the model has not read yet are spared where they fit."""
        stubs: dict[int, str] = {}
        tokens = overflow.before
        said = [n for n, entry in enumerate(self._history.entries) if entry.kind == "said"]
        unread_from = max(said, default=0)
        for n, entry in self._long_observations():
            if tokens <= overflow.limit * (1 if n > unread_from else EASED_SHARE):
                break
            text = text_of(entry.message)
            stubs[n] = stub(text, await self._files.keep(text))
            shorter = {**entry.message, "content": stubs[n]}
            tokens -= self._counter.estimate([entry.message]) - self._counter.estimate([shorter])
        if stubs:
            self._history.shorten(stubs)
            self._note("stubs", overflow, tokens)
        return tokens

    def _long_observations(self) -> list[tuple[int, Entry]]:
        return [
            (n, entry)
            for n, entry in enumerate(self._history.entries)
            if entry.kind == "observed"
            and isinstance(entry.message.get("content"), str)
            and is_stub_shorter(entry.message["content"])
        ]

    async def _sum_up(self, overflow: _Overflow) -> bool:
        """Replace all but the latest turns by a summary. Return whether that was done."""
        turns = self._history.turns()
        allowed = min(MAX_SUMMARY_TOKENS, overflow.limit // SUMMARY_PART)
        latest = self._latest(turns, round(overflow.limit * SUMMARY_SHARE) - allowed)
        gone = [e.message for turn in turns[: len(turns) - len(latest)] for e in turn]
        if self._gave_up or self._counter.estimate(gone) < 2 * WORTH_TOKENS:
            return False
        summary = await self._summary(allowed, overflow.limit)
        if not summary:
            self._gave_up = summary is not None
            return False
        self._history.sum_up(summary_message(summary), latest)
        self._note("summary", overflow, self._counter.tokens(self._history.messages))
        return True

    def _latest(self, turns: Sequence[Sequence[Entry]], free: int) -> Sequence[Sequence[Entry]]:
        """Return the last turns that fit beside the client's messages. Results of the client's
        tools in the last turn are among them in any case: the model has not read them yet."""
        entries = self._history.entries
        theirs = [entry.message for entry in entries if entry.kind == "theirs"]
        tokens, count = self._counter.tokens(theirs), 0
        for turn in reversed(turns):
            tokens += self._counter.estimate([e.message for e in turn if e.kind != "theirs"])
            if tokens > free:
                break
            count += 1
        if turns and any(entry.kind == "result" for entry in turns[-1]):
            count = max(count, 1)
        return turns[len(turns) - count :]

    async def _summary(self, allowed: int, limit: int) -> str | None:
        """Return the model's summary of the history; where that does not fit into the prompt, of
        less and less of it. "" if no part fits; None if a later try may succeed."""
        request: Message = {"role": "user", "content": summary_request(allowed)}
        told = list(self._history.entries)
        if told[-1].kind == "asked":
            told.pop()  # this question follows the summary
        messages = [entry.message for entry in told]
        tokens = limit
        for _ in range(MAX_ASKED):
            try:
                reply = await self._ask([*messages, request])
            except ContextOverflowError:
                tokens //= 2
                messages = _transcript(told, self._counter.chars(tokens))
                continue
            except BackendError as error:
                _LOG.warning("no summary of a full context: %s", error)
                return None
            if reply is None:
                return None
            return spoken(text_of(reply.message))[: allowed * MAX_CHARS_A_TOKEN]
        return ""

    def _note(self, kind: Literal["stubs", "summary"], overflow: _Overflow, after: int) -> None:
        self.done.append(Compaction(kind, overflow.cause, overflow.before, after))
        _LOG.info("context %s: %s, %d to %d tokens", overflow.cause, kind, overflow.before, after)


def _transcript(entries: Sequence[Entry], chars: int) -> list[Message]:
    """Return the client's messages, and in one more message what was said since, cut to about
    `chars` characters: each message to the same length, and of all of them the latest."""
    theirs = [entry.message for entry in entries if entry.kind == "theirs"]
    ours = [entry.message for entry in entries if entry.kind != "theirs"]
    shown = max(MIN_SHOWN_CHARS, chars // max(1, len(ours)))
    lines = [f"{each['role']}: {_cut(_text_and_calls(each), shown)}" for each in ours]
    return [*theirs, {"role": "user", "content": "\n\n".join(lines)[-chars:]}]


def _text_and_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join([text_of(message), *(f"{c['name']} {c['arguments']}" for c in calls)]).strip()


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars // 2]} [...] {text[-chars // 2 :]}"


def spoken(text: str) -> str:
    """Return a text without the thinking between `<think>` and `</think>`, also where a chat
    template has opened it or its end was cut off."""
    *blocks, rest = text.split(_END_THINK)  # a regular expression would take quadratic time
    said = [block.partition(_THINK)[0] if _THINK in block else "" for block in blocks]
    return "".join([*said, rest.partition(_THINK)[0]]).strip()


class TokenCounter:
    """The tokens of one run's history: those that the backend has counted, and an estimate of
    what came since."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._density = TOKENS_PER_BYTE
        self._tokens = 0
        """The prompt and the answer that the backend counted last."""
        self._counted: Sequence[Message] = ()
        """The messages of that prompt."""
        self._bytes = 0
        """The bytes of these messages."""
        self._uncounted: tuple[Sequence[Message], int, int] | None = None
        """The last count, until an estimate is asked for, which mostly never happens."""

    def counted(self, messages: Sequence[Message], prompt: int, answer: int) -> None:
        """Note the tokens that the backend has counted in these messages and its answer."""
        if prompt:
            self._uncounted = messages, prompt, answer

    def tokens(self, messages: Sequence[Message]) -> int:
        """Return the tokens of a prompt of these messages and the tools."""
        self._take_count()
        known = len(self._counted)
        if known and _begins_with(messages, self._counted):
            # The next message is the answer, which is counted already.
            return self._tokens + self.estimate(messages[known + 1 :])
        return round(self._tools_bytes * self._density) + self.estimate(messages)

    def estimate(self, messages: Sequence[Message]) -> int:
        """Return an estimate of the tokens of these messages alone."""
        self._take_count()
        return round(sum(map(_bytes_of, messages)) * self._density)

    def chars(self, tokens: int) -> int:
        """Return how many characters of text have about so many tokens."""
        self._take_count()
        return int(tokens / self._density)

    @cached_property
    def _tools_bytes(self) -> int:
        return len(json.dumps(self._tools)) if self._tools else 0

    def _take_count(self) -> None:
        if self._uncounted is None:
            return
        (messages, prompt, answer), self._uncounted = self._uncounted, None
        known = len(self._counted) if _begins_with(messages, self._counted) else 0
        before = self._bytes if known else 0
        self._bytes = before + sum(map(_bytes_of, messages[known:]))
        self._density = tokens_per_byte(prompt, self._tools_bytes + self._bytes)
        self._tokens = prompt + answer
        self._counted = messages


def _begins_with(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return whether the first messages are the same objects as the others: a segment keeps those
    that it does not replace."""
    if len(messages) < len(others):
        return False
    return all(one is other for one, other in zip(messages, others, strict=False))


def _bytes_of(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    size = _BESIDE_BYTES + sum(_bytes_of_part(part) for part in parts if part)
    beside = {key: each for key, each in message.items() if key not in ("role", "content")}
    return size + (len(json.dumps(beside)) if beside else 0)


def _bytes_of_part(part: Any) -> int:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        return PICTURE_BYTES
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


class ObservationFiles:
    """Observations of one run kept whole in its sandbox, once stubs take their place in the
    history."""

    def __init__(self, run_id: str, computer: Callable[[], Awaitable[Sandbox | None]]) -> None:
        """`computer` returns the run's sandbox, if it has one."""
        # Runs of a conversation share the sandbox; ids made from time begin alike.
        self._name = run_id[-8:]
        self._computer = computer
        self._count = 0

    async def keep(self, text: str) -> str | None:
        """Write a text into the sandbox. Return its path, or None if it could not be written."""
        computer = await self._computer()
        if computer is None:
            return None
        self._count += 1
        path = f"{OBSERVATION_DIR}/{self._name}-{self._count}.txt"

        async def written() -> AsyncIterator[bytes]:
            yield text.encode(errors="replace")

        try:
            await computer.put(path, written(), timeout_s=KEEP_S)
        except (SandboxFileError, SandboxLostError):
            return None
        return path
