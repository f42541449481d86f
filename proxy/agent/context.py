"""The room that a run has in its model's context: looked at before each call, made if need be."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.context import ContextSizes, room
from proxy.agent.compaction import Ask, Compactor, Need
from proxy.agent.gauge import Gauge
from proxy.agent.history import History
from proxy.agent.model import Message, Reply
from proxy.agent.observation_files import ObservationFiles
from proxy.agent.task import Compaction
from proxy.agent.usage import tokens
from proxy.agent.windows import Window
from proxy.errors import ContextOverflowError

BUDGETS = ("n_predict", "max_completion_tokens", "max_tokens")
MIN_ANSWER_TOKENS = 256
"""A budget is never made smaller than this to let a prompt in."""
SPARE_TOKENS = 32
SPARE_PART = 32
"""A prompt may be longer by this part (1/32) than is estimated."""
REFUSED_SHARE = 0.9
"""What may be left of a prompt that was refused, where no better number is known."""


class Context:
    """Of one run."""

    def __init__(
        self,
        window: Window,
        history: History,
        gauge: Gauge,
        files: ObservationFiles,
        ask: Ask,
        *,
        compacts: bool,
    ) -> None:
        """`compacts`: whether the history may be made smaller."""
        self._compacts = compacts
        self._window = window
        self._history = history
        self._gauge = gauge
        self._compactor = Compactor(history, gauge, files, ask)
        self._ceiling: int | None = None
        """A prompt that was refused although it had seemed to fit."""

    @property
    def known_window(self) -> int | None:
        """The model's window, if it is known without asking."""
        return self._window.known

    @property
    def compactions(self) -> Sequence[Compaction]:
        """How often room was made, and how."""
        return self._compactor.done

    async def fitted(self, extra: Mapping[str, Any], *, shortens: bool) -> Mapping[str, Any]:
        """The fields of a call, its token budget made smaller if need be; the history is made
        smaller first where it is about to overflow and may be (`shortens`)."""
        if len(self._history.entries) == self._history.ours_from:
            return extra  # the request alone: whether it fits is for the backend to say
        window = await self._window.tokens()
        limit = self._limit(window, extra)
        shortens = shortens and self._compacts
        if shortens and limit is not None and (before := self._tokens()) > limit:
            await self._compactor.make_room(Need("nearly full", limit, before))
        return self._with_budget(window, extra)

    async def refitted(
        self, extra: Mapping[str, Any], error: ContextOverflowError, *, shortens: bool
    ) -> Mapping[str, Any]:
        """The same after a call was refused. Raises that error where nothing can be done."""
        self._learn(extra, error.sizes)
        window = await self._window.tokens()
        limit, before = self._limit(window, extra), self._tokens()
        if limit is None or before <= limit:
            self._ceiling = limit = int(before * REFUSED_SHARE)
        need = Need("refused", limit, before)
        may_shorten = shortens and self._compacts
        is_smaller = may_shorten and await self._compactor.make_room(need)
        smaller = self._with_budget(window, extra)
        if not is_smaller and smaller == extra:
            raise error
        return smaller

    async def told(
        self, extra: Mapping[str, Any], error: ContextOverflowError
    ) -> Mapping[str, Any]:
        """Return the fields of a call whose token limit was lowered after a refusal, lowered
        further if the sizes in the refusal demand it."""
        self._learn(extra, error.sizes)
        return self._with_budget(await self._window.tokens(), extra)

    def counted(self, messages: Sequence[Message], reply: Reply) -> None:
        """The backend has taken these messages and answered."""
        prompt = tokens(reply.usage, "prompt_tokens")
        answer = tokens(reply.usage, "completion_tokens")
        self._gauge.counted(messages, prompt, answer)
        self._window.taken(prompt + answer)

    def _tokens(self) -> int:
        return self._gauge.tokens(self._history.messages)

    def _learn(self, extra: Mapping[str, Any], sizes: ContextSizes) -> None:
        self._window.refused(sizes)
        if sizes.window is None:
            return
        answer = sizes.answer or _budget(extra)[1] or 0
        prompt = sizes.prompt or sizes.window - answer
        if prompt > self._tokens():
            self._gauge.counted(self._history.messages, prompt, 0)
        if sizes.answer and _budget(extra)[1] is None and sizes.answer < sizes.window:
            self._ceiling = sizes.window - sizes.answer  # what the backend leaves by itself

    def _limit(self, window: int | None, extra: Mapping[str, Any]) -> int | None:
        """How many tokens a prompt may have, as far as is known."""
        limits = [] if window is None else [window - room(window, _budget(extra)[1])]
        if self._ceiling is not None:
            limits.append(self._ceiling)
        return min(limits, default=None)

    def _with_budget(self, window: int | None, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """The client's budget holds for its own prompt; ours has grown since, and backends refuse
        what could not fit beside it."""
        field, asked = _budget(extra)
        if window is None or asked is None:
            return extra
        prompt = self._tokens()
        left = window - prompt - SPARE_TOKENS - prompt // SPARE_PART
        return {**extra, field: left} if MIN_ANSWER_TOKENS <= left < asked else extra


def _budget(extra: Mapping[str, Any]) -> tuple[str, int | None]:
    found = ((field, extra.get(field)) for field in BUDGETS)
    return next(((field, n) for field, n in found if isinstance(n, int)), ("", None))
