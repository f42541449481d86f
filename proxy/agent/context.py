"""Keeps a run within its model's context window: counts the tokens of the history, lowers the token
limit of a call, and compacts the history, first by stubs in place of old observations, then by a
summary. Each compaction begins a new segment of the history.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from policies.context import (
    COMPACTED_SHARE,
    MEDIA_BYTES,
    SUMMARY_SHARE,
    TOKENS_PER_BYTE,
    ContextSizes,
    reserved_tokens,
    tokens_per_byte,
)
from policies.large_json import count_chars
from policies.observation import is_stub_shorter, stub
from policies.prompts import summary_message, summary_request
from policies.workspace import OBSERVATION_DIR
from proxy.agent.context_windows import ContextWindow
from proxy.agent.history import Entry, History, text_of
from proxy.agent.model import Completion, Message
from proxy.agent.result import Compaction, usage_count
from proxy.errors import BackendError, ContextOverflowError
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

_LOG = logging.getLogger(__name__)
TOKEN_LIMIT_FIELDS = ("n_predict", "max_completion_tokens", "max_tokens")
"""The fields in which backends take a request's token limit."""
MIN_ANSWER_TOKENS = 256
"""A call's token limit is never lowered below this number."""
SPARE_TOKENS = 32
SPARE_DIVISOR = 32
"""The margin for errors of the estimate of a prompt: SPARE_TOKENS plus 1/32 of the estimate."""
REFUSED_SHARE = 0.9
"""Maximum size of the next prompt, as a share of the refused prompt, if no smaller limit is
known."""
MIN_SUMMARIZED_TOKENS = 400
"""A summary is requested only if the messages that it replaces have at least twice this number of
tokens."""
MAX_SUMMARY_TOKENS = 2000
SUMMARY_DIVISOR = 8
"""A summary has at most MAX_SUMMARY_TOKENS tokens, and at most 1/8 of the maximum prompt tokens."""
MAX_SUMMARY_ATTEMPTS = 4
"""Maximum number of summary calls. After each call that does not fit, the transcript is halved."""
MIN_SHOWN_CHARS = 200
"""Minimum number of characters that a transcript shows of each message."""
MAX_CHARS_PER_TOKEN = 6
_TEMPLATE_BYTES = 16
"""Bytes that a chat template adds to a message."""
WRITE_TIMEOUT_S = 10.0
"""Timeout of writing one observation into the sandbox, in seconds."""
_LONG_CHARS = 1 << 20
"""Maximum length of texts and messages that are measured completely. The size of a longer one is
estimated."""
_THINK, _END_THINK = "<think>", "</think>"

OutOfBandCall = Callable[[Sequence[Message]], Awaitable[Completion | None]]
"""Makes a model call without tools. Returns None if the budget rules the call out. Raises
BackendError."""


class ContextFitter:
    """Keeps the prompts of one run within the context window."""

    def __init__(
        self,
        window: ContextWindow,
        history: History,
        counter: "TokenCounter",
        files: "ObservationFiles",
        complete: OutOfBandCall,
        *,
        compacts: bool,
    ) -> None:
        """`complete` makes the summary call. `compacts` is False if the profile rules out
        compaction."""
        self._compacts = compacts
        self._window = window
        self._history = history
        self._counter = counter
        self._compactor = _Compactor(history, counter, files, complete)
        self._max_prompt_tokens: int | None = None
        """Maximum prompt tokens, learnt from refusals; None before the first refusal."""

    @property
    def known_window(self) -> int | None:
        """The context window in tokens if it is known without asking the server, else None."""
        return self._window.known_tokens

    @property
    def compactions(self) -> Sequence[Compaction]:
        """The compactions of the history, in order."""
        return self._compactor.compactions

    async def fit(self, extra_fields: Mapping[str, Any], *, may_compact: bool) -> Mapping[str, Any]:
        """Return the `extra_fields` of a call, with the token limit lowered if necessary. Compact
        the history first if the prompt does not fit and `may_compact` is True."""
        if len(self._history.entries) == self._history.run_start_index:
            return extra_fields  # only the client's request: the backend decides whether it fits
        window = await self._window.tokens()
        limit = self._prompt_limit(window, extra_fields)
        may_compact = may_compact and self._compacts
        if may_compact and limit is not None and (before := self._prompt_tokens()) > limit:
            await self._compactor.compact(_Overflow("nearly full", limit, before))
        return self._with_token_limit(window, extra_fields)

    async def fit_after_overflow(
        self, extra_fields: Mapping[str, Any], error: ContextOverflowError, *, may_compact: bool
    ) -> Mapping[str, Any]:
        """Shrink a call that the backend refused as too long: compact the history if `may_compact`
        is True, and lower the token limit. Return the fields of the call. Raises `error` if neither
        is possible."""
        self._record_refusal(extra_fields, error.sizes)
        window = await self._window.tokens()
        limit, before = self._prompt_limit(window, extra_fields), self._prompt_tokens()
        if limit is None or before <= limit:
            self._max_prompt_tokens = limit = int(before * REFUSED_SHARE)
        compacts = may_compact and self._compacts
        overflow = _Overflow("refused", limit, before)
        is_smaller = compacts and await self._compactor.compact(overflow)
        smaller = self._with_token_limit(window, extra_fields)
        if not is_smaller and smaller == extra_fields:
            raise error
        return smaller

    async def lower_token_limit_after_overflow(
        self, extra_fields: Mapping[str, Any], error: ContextOverflowError
    ) -> Mapping[str, Any]:
        """Return the fields of a refused call, with the token limit lowered to fit the window that
        the refusal names."""
        self._record_refusal(extra_fields, error.sizes)
        return self._with_token_limit(await self._window.tokens(), extra_fields)

    def record_usage(self, messages: Sequence[Message], reply: Completion) -> None:
        """Record the backend's token counts of these messages and the reply."""
        prompt = usage_count(reply.usage, "prompt_tokens")
        answer = usage_count(reply.usage, "completion_tokens")
        self._counter.record_usage(messages, prompt, answer)
        self._window.record_usage(prompt + answer)

    def _prompt_tokens(self) -> int:
        return self._counter.tokens(self._history.messages)

    def _record_refusal(self, extra_fields: Mapping[str, Any], sizes: ContextSizes) -> None:
        """Record the sizes that a refusal of the backend names."""
        self._window.record_refusal(sizes)
        if sizes.window is None:
            return
        requested = _token_limit(extra_fields)[1]
        prompt = sizes.prompt or sizes.window - (sizes.answer or requested or 0)
        if prompt > self._prompt_tokens():
            self._counter.record_usage(self._history.messages, prompt, 0)
        if sizes.answer and requested is None and sizes.answer < sizes.window:
            self._max_prompt_tokens = (
                sizes.window - sizes.answer
            )  # the backend reserves the rest for the answer

    def _prompt_limit(self, window: int | None, extra_fields: Mapping[str, Any]) -> int | None:
        """Return the maximum prompt tokens, or None if unknown."""
        limits = (
            []
            if window is None
            else [window - reserved_tokens(window, _token_limit(extra_fields)[1])]
        )
        if self._max_prompt_tokens is not None:
            limits.append(self._max_prompt_tokens)
        return min(limits, default=None)

    def _with_token_limit(
        self, window: int | None, extra_fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the fields with a token limit that fits beside the prompt. Backends refuse a limit
        that does not fit, and the prompt has grown since the client chose its limit."""
        field, requested = _token_limit(extra_fields)
        if window is None or requested is None:
            return extra_fields
        prompt = self._prompt_tokens()
        left = window - prompt - SPARE_TOKENS - prompt // SPARE_DIVISOR
        return (
            {**extra_fields, field: left} if MIN_ANSWER_TOKENS <= left < requested else extra_fields
        )


def _token_limit(extra_fields: Mapping[str, Any]) -> tuple[str, int | None]:
    found = ((field, extra_fields.get(field)) for field in TOKEN_LIMIT_FIELDS)
    return next(((field, n) for field, n in found if isinstance(n, int)), ("", None))


@dataclass(frozen=True, slots=True)
class _Overflow:
    """A prompt that is too long."""

    cause: Literal["nearly full", "refused"]
    limit: int
    """Maximum prompt tokens."""
    tokens_before: int
    """Prompt tokens before the compaction."""


class _Compactor:
    """Compacts the history of one run."""

    def __init__(
        self,
        history: History,
        counter: "TokenCounter",
        files: "ObservationFiles",
        complete: OutOfBandCall,
    ) -> None:
        self._history = history
        self._counter = counter
        self._files = files
        self._complete = complete
        self._cannot_summarize = False
        self.compactions: list[Compaction] = []

    async def compact(self, overflow: _Overflow) -> bool:
        """Compact the history. Return True if a summary or stubs have made the history smaller."""
        after = await self._replace_observations(overflow)
        is_smaller = after < overflow.tokens_before
        lasts = after <= overflow.limit * (1 + COMPACTED_SHARE) / 2 or any(
            self._long_observations()
        )
        if after <= overflow.limit and lasts:
            return is_smaller
        # With stubs alone the next turn would overflow again.
        return await self._summarize(overflow) or is_smaller

    async def _replace_observations(self, overflow: _Overflow) -> int:
        """Replace observations by stubs, the oldest first, until the prompt is no longer than
        COMPACTED_SHARE of the limit, or no long observation is left. Return the new number of
        prompt tokens. Observations that the model has not read yet are replaced only if the prompt
        does not fit otherwise."""
        stubs: dict[int, str] = {}
        tokens = overflow.tokens_before
        said = [n for n, entry in enumerate(self._history.entries) if entry.kind == "said"]
        unread_from = max(said, default=0)
        for n, entry in self._long_observations():
            if tokens <= overflow.limit * (1 if n > unread_from else COMPACTED_SHARE):
                break
            text = text_of(entry.message)
            stubs[n] = stub(text, await self._files.save(text))
            shorter = {**entry.message, "content": stubs[n]}
            tokens -= self._counter.estimate_tokens(
                [entry.message]
            ) - self._counter.estimate_tokens([shorter])
        if stubs:
            self._history.replace_with_stubs(stubs)
            self._record_compaction("stubs", overflow, tokens)
        return tokens

    def _long_observations(self) -> list[tuple[int, Entry]]:
        return [
            (n, entry)
            for n, entry in enumerate(self._history.entries)
            if entry.kind == "observed"
            and isinstance(entry.message.get("content"), str)
            and is_stub_shorter(entry.message["content"])
        ]

    async def _summarize(self, overflow: _Overflow) -> bool:
        """Replace all but the latest turns by a summary. Return False if the history was left
        unchanged."""
        turns = self._history.turns()
        allowed = min(MAX_SUMMARY_TOKENS, overflow.limit // SUMMARY_DIVISOR)
        latest = self._latest_turns(turns, round(overflow.limit * SUMMARY_SHARE) - allowed)
        dropped = [e.message for turn in turns[: len(turns) - len(latest)] for e in turn]
        if (
            self._cannot_summarize
            or self._counter.estimate_tokens(dropped) < 2 * MIN_SUMMARIZED_TOKENS
        ):
            return False
        summary = await self._request_summary(allowed, overflow.limit)
        if not summary:
            self._cannot_summarize = summary is not None
            return False
        self._history.replace_with_summary(summary_message(summary), latest)
        self._record_compaction("summary", overflow, self._counter.tokens(self._history.messages))
        return True

    def _latest_turns(
        self, turns: Sequence[Sequence[Entry]], max_tokens: int
    ) -> Sequence[Sequence[Entry]]:
        """Return the last turns that fit into `max_tokens` tokens beside the client's messages. A
        last turn with results of the client's tools is always kept: the model has not read them
        yet."""
        entries = self._history.entries
        client_messages = [entry.message for entry in entries if entry.kind == "theirs"]
        tokens, count = self._counter.tokens(client_messages), 0
        for turn in reversed(turns):
            tokens += self._counter.estimate_tokens([e.message for e in turn if e.kind != "theirs"])
            if tokens > max_tokens:
                break
            count += 1
        if turns and any(entry.kind == "result" for entry in turns[-1]):
            count = max(count, 1)
        return turns[len(turns) - count :]

    async def _request_summary(self, max_tokens: int, prompt_limit: int) -> str | None:
        """Return the model's summary of the history, or of a shortened transcript if the history
        does not fit into a prompt. Return "" if no transcript fits or the summary is empty. Return
        None if the call failed or the budget rules it out: a later attempt may succeed."""
        request: Message = {"role": "user", "content": summary_request(max_tokens)}
        entries = list(self._history.entries)
        if entries[-1].kind == "asked":
            entries.pop()  # the proxy's request follows the summary
        messages = [entry.message for entry in entries]
        tokens = prompt_limit
        for _ in range(MAX_SUMMARY_ATTEMPTS):
            try:
                reply = await self._complete([*messages, request])
            except ContextOverflowError:
                tokens //= 2
                messages = _transcript(entries, self._counter.estimate_chars(tokens))
                continue
            except BackendError as error:
                _LOG.warning("the context could not be summarized: %s", error)
                return None
            if reply is None:
                return None
            return strip_reasoning(text_of(reply.message))[: max_tokens * MAX_CHARS_PER_TOKEN]
        return ""

    def _record_compaction(
        self, kind: Literal["stubs", "summary"], overflow: _Overflow, tokens_after: int
    ) -> None:
        self.compactions.append(
            Compaction(kind, overflow.cause, overflow.tokens_before, tokens_after)
        )
        _LOG.info(
            "context %s: %s, %d to %d tokens",
            overflow.cause,
            kind,
            overflow.tokens_before,
            tokens_after,
        )


def _transcript(entries: Sequence[Entry], max_chars: int) -> list[Message]:
    """Return the client's messages, and one message with the text of the run's other messages. The
    text is shortened to `max_chars` characters: each message is truncated to the same length, and
    then the beginning of the text is dropped."""
    client_messages = [entry.message for entry in entries if entry.kind == "theirs"]
    run_messages = [entry.message for entry in entries if entry.kind != "theirs"]
    chars_each = max(MIN_SHOWN_CHARS, max_chars // max(1, len(run_messages)))
    lines = [
        f"{message['role']}: {_truncate_middle(_text_and_calls(message), chars_each)}"
        for message in run_messages
    ]
    return [*client_messages, {"role": "user", "content": "\n\n".join(lines)[-max_chars:]}]


def _text_and_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join([text_of(message), *(f"{c['name']} {c['arguments']}" for c in calls)]).strip()


def _truncate_middle(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars // 2]} [...] {text[-chars // 2 :]}"


def strip_reasoning(text: str) -> str:
    """Return a text without the reasoning between `<think>` and `</think>`, even if the opening tag
    is in the chat template or the closing tag was cut off."""
    *blocks, rest = text.split(_END_THINK)  # a regular expression would take quadratic time
    outside = [block.partition(_THINK)[0] if _THINK in block else "" for block in blocks]
    return "".join([*outside, rest.partition(_THINK)[0]]).strip()


class TokenCounter:
    """Counts the tokens of one run's history: the backend's last count, and an estimate of later
    messages."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._tokens_per_byte = TOKENS_PER_BYTE
        self._counted_tokens = 0
        """Tokens of the prompt and the answer that the backend counted last."""
        self._counted_messages: Sequence[Message] = ()
        """The messages of the prompt that the backend counted last."""
        self._counted_bytes = 0
        """Size of `_counted_messages` in bytes."""
        self._pending_count: tuple[Sequence[Message], int, int] | None = None
        """Latest token count from the backend, applied lazily: most runs never need an estimate."""

    def record_usage(self, messages: Sequence[Message], prompt: int, answer: int) -> None:
        """Record the tokens that the backend counted in these messages and its answer."""
        if prompt:
            self._pending_count = messages, prompt, answer

    def tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a prompt with these messages and the tools: the backend's
        last count as far as it applies, and an estimate of the rest."""
        self._apply_pending_count()
        known = len(self._counted_messages)
        if known and _begins_with(messages, self._counted_messages):
            # The message after the counted prompt is the answer, which is counted too.
            return self._counted_tokens + self.estimate_tokens(messages[known + 1 :])
        return round(self._tools_size * self._tokens_per_byte) + self.estimate_tokens(messages)

    def estimate_tokens(self, messages: Sequence[Message]) -> int:
        """Return the estimated tokens of these messages, without the tools."""
        self._apply_pending_count()
        return round(sum(map(_message_size, messages)) * self._tokens_per_byte)

    def estimate_chars(self, tokens: int) -> int:
        """Return how many characters of text make about `tokens` tokens."""
        self._apply_pending_count()
        return int(tokens / self._tokens_per_byte)

    @cached_property
    def _tools_size(self) -> int:
        return len(json.dumps(self._tools)) if self._tools else 0

    def _apply_pending_count(self) -> None:
        if self._pending_count is None:
            return
        (messages, prompt, answer), self._pending_count = self._pending_count, None
        known = len(self._counted_messages) if _begins_with(messages, self._counted_messages) else 0
        before = self._counted_bytes if known else 0
        self._counted_bytes = before + sum(map(_message_size, messages[known:]))
        self._tokens_per_byte = tokens_per_byte(prompt, self._tools_size + self._counted_bytes)
        self._counted_tokens = prompt + answer
        self._counted_messages = messages


def _begins_with(messages: Sequence[Message], prefix: Sequence[Message]) -> bool:
    """Return True if `messages` begins with the same objects as `prefix`. A new segment keeps the
    objects that it does not replace."""
    if len(messages) < len(prefix):
        return False
    return all(one is other for one, other in zip(messages, prefix, strict=False))


def _message_size(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    size = _TEMPLATE_BYTES + sum(_part_size(part) for part in parts if part)
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return size + (_json_size(rest) if rest else 0)


def _json_size(fields: Mapping[str, Any]) -> int:
    """Return the length of a message's fields as JSON; an estimate if the fields are long."""
    chars = count_chars(fields)
    return chars if chars > _LONG_CHARS else len(json.dumps(fields))


def _part_size(part: Any) -> int:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        return MEDIA_BYTES
    if text.isascii():
        return len(text)
    start = text[:_LONG_CHARS]  # of a long text the rest is estimated
    return len(start.encode(errors="replace")) * len(text) // len(start)


class ObservationFiles:
    """Saves the observations of one run as files in its sandbox when stubs replace them."""

    def __init__(self, run_id: str, get_sandbox: Callable[[], Awaitable[Sandbox | None]]) -> None:
        """`get_sandbox` returns the run's sandbox, or None if it has none."""
        # The names differ by run, for the runs of a session share the sandbox.
        self._file_prefix = run_id[-8:]
        self._get_sandbox = get_sandbox
        self._file_count = 0

    async def save(self, text: str) -> str | None:
        """Write a text into the sandbox. Return the path, or None if the run has no sandbox or the
        write failed."""
        sandbox = await self._get_sandbox()
        if sandbox is None:
            return None
        self._file_count += 1
        path = f"{OBSERVATION_DIR}/{self._file_prefix}-{self._file_count}.txt"

        async def text_bytes() -> AsyncIterator[bytes]:
            yield text.encode(errors="replace")

        try:
            await sandbox.put(path, text_bytes(), timeout_s=WRITE_TIMEOUT_S)
        except (SandboxFileError, SandboxLostError):
            return None
        return path
