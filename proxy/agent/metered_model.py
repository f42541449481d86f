"""The metered model: each of its calls is counted by the budget of a run, even if the reply is
cut off."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from policies.prices import CHARS_PER_TOKEN, TokenUsage, estimate_prompt_tokens, parse_usage
from proxy.agent.budget import RunBudget
from proxy.agent.events import (
    ModelCallFailed,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    TokenCount,
    ToolCallDelta,
)
from proxy.agent.history import text_of
from proxy.agent.model import Completion, CompletionStopped, Message, Model
from proxy.agent.prose import estimated_tokens
from proxy.errors import BackendError


class MeteredModel:
    """A model whose calls are counted by a RunBudget."""

    def __init__(self, model: Model, budget: RunBudget, timeout_s: float | None = None) -> None:
        """`timeout_s` is the read timeout of the backend; None keeps the model's own."""
        self.partial_completion: Completion | None = None
        """The reply to the last call as far as it arrived, if an error or a cancellation cut it
        off; else None."""
        self._model = model if timeout_s is None else model.with_timeout(timeout_s)
        self._budget = budget

    async def reserve_extra_call(self, messages: Sequence[Message]) -> bool:
        """Reserve a call in addition to the turn's own call. Return False if the budget rules the
        call out."""
        return await self._budget.reserve_extra_call(messages) is None

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        """See `Model`."""
        return await self._model.tokenize_prompt(model, prompt)

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """Make a model call, even over budget; see `ChatModel`. If `on_delta` raises
        CompletionStopped, return the reply as far as it arrived. A reply that an error or a
        cancellation cuts off is counted as far as it arrived, and is left in `partial_completion`.
        Raises BackendError."""
        reservation = await self._budget.begin_call(body["messages"])
        recorder = CompletionRecorder(body["messages"])
        self.partial_completion = None
        try:
            reply = await self._model.complete(body, on_delta and recorder.wrap(on_delta))
        except CompletionStopped as stopped:
            reply = recorder.completion(stopped)
        except (BackendError, asyncio.CancelledError) as error:
            with anyio.CancelScope(shield=True):
                if recorder.has_begun:
                    self.partial_completion = recorder.completion()
                    tokens = parse_usage(self.partial_completion.usage)
                    await self._budget.end_call(tokens, reservation)
                # No refund after a cancellation: the backend may still work on the call.
                elif isinstance(error, BackendError):
                    await self._budget.refund_call(reservation)
            raise
        await self._budget.end_call(_token_usage(reply, body["messages"]), reservation)
        return reply


class CompletionRecorder:
    """Records the deltas of one reply, so that a Completion can be built of a reply that is cut
    off."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """`messages` is the prompt."""
        self._messages = messages
        self._text_deltas: list[TextDelta] = []
        self._reasoning_texts: list[str] = []
        self._piece_count = 0
        self._chars = 0
        self._token_count: TokenCount | None = None
        self._counted_pieces = 0
        """Number of pieces that had arrived when the backend last sent a token count."""

    def wrap(self, on_delta: OnDelta) -> OnDelta:
        """Return a callback that records each delta before it calls `on_delta`."""

        async def record(delta: ModelDelta) -> None:
            self._record(delta)
            await on_delta(delta)

        return record

    @property
    def has_begun(self) -> bool:
        """True once a piece of the reply has arrived."""
        return self._piece_count > 0

    def completion(self, stopped: CompletionStopped | None = None) -> Completion:
        """Return the reply as far as it arrived. `stopped` is the cause if the proxy cut it off.

        Tool calls are left out, except in a reply that was cut off because of too many calls. That
        reply keeps its complete calls and one further call, so that `Turn.has_more_calls` is
        True."""
        if stopped is not None and stopped.cause == "many_calls" and stopped.partial_completion:
            return replace(stopped.partial_completion, usage=self._usage(), stop_cause="many_calls")
        reasoning = "".join(self._reasoning_texts)
        text = "".join(delta.text for delta in self._text_deltas)
        if stopped is not None and stopped.stop_string:
            text = text.partition(stopped.stop_string)[0]
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        is_complete = stopped is not None and stopped.cause in ("stop", "no_call")
        sent = stopped.partial_completion if stopped else None
        return Completion(
            message=message,
            finish_reason="stop" if is_complete else "length",
            usage=self._usage(),
            choice={**(sent.choice if sent else {}), **self._choice_fields(stopped)},
            response=sent.response if sent else {},
            stop_cause=stopped.cause if stopped else None,
        )

    def _record(self, delta: ModelDelta) -> None:
        match delta:
            case TextDelta(text):
                self._text_deltas.append(delta)
                self._count_piece(text)
            case ReasoningDelta(text):
                self._reasoning_texts.append(text)
                self._count_piece(text)
            case ToolCallDelta(arguments=text):
                self._count_piece(text)
            case TokenCount():
                self._token_count, self._counted_pieces = delta, self._piece_count
            case ModelCallFailed():  # the tokens of the failed attempt still count
                self._text_deltas.clear()
                self._reasoning_texts.clear()

    def _count_piece(self, text: str) -> None:
        self._piece_count += 1
        self._chars += len(text)

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far: from the backend's running count, else an estimate that is
        marked `estimated`."""
        if self._token_count is not None:
            prompt = self._token_count.prompt
            completion = self._token_count.completion + self._piece_count - self._counted_pieces
        else:
            prompt = estimate_prompt_tokens(self._messages)
            completion = estimated_tokens(self._piece_count, self._chars)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return usage if self._token_count is not None else {**usage, "estimated": True}

    def _choice_fields(self, stopped: CompletionStopped | None) -> dict[str, Any]:
        contents = [
            d.logprobs.get("content") for d in self._text_deltas if isinstance(d.logprobs, dict)
        ]
        found = [tokens for tokens in contents if isinstance(tokens, list)]
        choice: dict[str, Any] = {}
        if found:
            choice["logprobs"] = {"content": [token for tokens in found for token in tokens]}
        if stopped is not None and stopped.stop_string is not None:
            choice["stop_reason"] = stopped.stop_string
        return choice


def _token_usage(reply: Completion, messages: list[Message]) -> TokenUsage:
    """Return the tokens of a call, or an estimate if the backend reports neither tokens nor a
    cost."""
    tokens = parse_usage(reply.usage)
    if tokens.total or tokens.reported_usd is not None:
        return tokens
    completion = len(text_of(reply.message)) // CHARS_PER_TOKEN
    return TokenUsage(prompt=estimate_prompt_tokens(messages), completion=completion)
