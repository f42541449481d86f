"""The capture of model calls for the trajectory of a run: if the task asks for a trajectory, the
model that `model_of_run` returns emits each call."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.agent.budget import RunBudget
from proxy.agent.events import CallTokens, Emit, ModelCallAccepted, ModelCallFinished, OnDelta
from proxy.agent.history import completion_deltas
from proxy.agent.metered_model import MeteredModel
from proxy.agent.model import Completion, CompletionStopped, Message, Model
from proxy.agent.task import AgentTask, WeightVersion
from proxy.agent.tokens import (
    read_tokens,
    refuses_token_output_params,
    rendered_prompt,
    with_token_output_params,
    without_tokens,
)
from proxy.errors import BackendError

log = logging.getLogger(__name__)

MAX_REFUSAL_CHARS = 300
"""Maximum number of characters of the backend's error message in `CallTokens.missing`."""


def model_of_run(
    model: Model, budget: RunBudget, task: AgentTask, emit: Emit, timeout_s: float | None = None
) -> MeteredModel:
    """Return the metered model of one run, which also emits its calls if the task captures them.
    `timeout_s` is the read timeout of the backend; None keeps the model's own."""
    if task.capture == "none":
        return MeteredModel(model, budget, timeout_s)
    if task.captures_tokens:
        return TokenCapturingModel(model, budget, timeout_s, emit, task.weight_version)
    return CapturingModel(model, budget, timeout_s, emit)


class CapturingModel(MeteredModel):
    """A metered model that emits a ModelCallFinished for each call."""

    def __init__(
        self, model: Model, budget: RunBudget, timeout_s: float | None, emit: Emit
    ) -> None:
        super().__init__(model, budget, timeout_s)
        self._emit = emit
        self._previous_messages: list[Message] = []
        """The messages of the previous call."""
        self._call_tokens: CallTokens | None = None
        """The tokens of the last call, if it has ended and tokens are captured."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        began = time.monotonic()
        self._call_tokens = None
        try:
            reply = await self._call(body, on_delta)
        except BackendError as error:
            await self._report(body, self.partial_completion, began, error.message)
            raise
        except asyncio.CancelledError:
            # No subscriber receives the event, so a cancelled run does not wait here.
            await self._report(body, self.partial_completion, began, "The call was cut off.")
            raise
        await self._report(body, reply, began)
        return reply

    async def _call(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        return await super().complete(body, on_delta)

    async def _report(
        self,
        body: Mapping[str, Any],
        reply: Completion | None,
        started_at: float,
        error: str | None = None,
    ) -> None:
        messages = list(body["messages"])
        shared_prefix = common_prefix_length(self._previous_messages, messages)
        self._previous_messages = messages
        event = ModelCallFinished(
            shared_prefix=shared_prefix,
            messages=messages[shared_prefix:],
            settings={name: value for name, value in body.items() if name != "messages"},
            duration_s=time.monotonic() - started_at,
            reply=reply.message if reply else None,
            finish_reason=reply.finish_reason if reply else "",
            usage=reply.usage if reply else {},
            error=error,
            tokens=self._call_tokens,
        )
        try:
            await self._emit(event)
        except Exception:
            log.exception("a model call cannot be captured")
            self._previous_messages = []  # the next call repeats the messages


class TokenCapturingModel(CapturingModel):
    """A captured model that also requests the token ids and log probabilities of each call.

    The calls are not streamed, because engines leave token ids out of a stream. `on_delta` gets the
    pieces of a reply once the reply is complete. If the backend refuses the parameters, the run
    continues without them, and the trajectory says why.
    """

    _refusal: str | None = None
    """The reason for which the backend refused the parameters; None if it has not refused them."""

    def __init__(
        self,
        model: Model,
        budget: RunBudget,
        timeout_s: float | None,
        emit: Emit,
        weight_version: WeightVersion,
    ) -> None:
        super().__init__(model, budget, timeout_s, emit)
        self._weight_version = weight_version

    async def _call(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        version = self._weight_version.value  # POST /v1/resume may change it during the call
        reply = await self._complete(body)
        tokens = await self._tokens_of(reply, body["model"])
        self._call_tokens = replace(tokens, weight_version=tokens.weight_version or version)
        reply = without_tokens(reply, body)
        if on_delta is not None:
            try:
                await on_delta(ModelCallAccepted())
                for delta in completion_deltas(reply):
                    await on_delta(delta)
            except CompletionStopped as stopped:
                return replace(reply, stop_cause=stopped.cause)
        return reply

    async def _tokens_of(self, reply: Completion, model: str) -> CallTokens:
        if self._refusal:
            return CallTokens(missing=self._refusal)
        prompt = rendered_prompt(reply)
        rendered_ids = None if prompt is None else await self.tokenize_prompt(model, prompt)
        return read_tokens(reply, rendered_ids)

    async def _complete(self, body: Mapping[str, Any]) -> Completion:
        if self._refusal is None:
            try:
                return await MeteredModel.complete(self, with_token_output_params(body), None)
            except BackendError as error:
                if not refuses_token_output_params(error):
                    raise
                message = error.message[:MAX_REFUSAL_CHARS]
                self._refusal = f"The backend refused the parameters: {message}"
        return await MeteredModel.complete(self, body, None)


def common_prefix_length(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of messages at the start of both prompts that are the same objects."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one is not other:
            break
        length += 1
    return length
