"""The capture of model calls for the trajectory of a run: `metered_model` returns the model of a
run, which emits each call if the task asks for a trajectory."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.agent.budget import MeteredModel, RunBudget
from proxy.agent.events import Emit, ModelCallFinished, OnDelta
from proxy.agent.model import Completion, Message, Model
from proxy.agent.task import AgentTask
from proxy.errors import BackendError

log = logging.getLogger(__name__)


def metered_model(
    model: Model, budget: RunBudget, task: AgentTask, emit: Emit, timeout_s: float | None = None
) -> MeteredModel:
    """Return the model of one run. `timeout_s` is the read timeout of the backend; None keeps the
    model's own."""
    if task.capture == "none":
        return MeteredModel(model, budget, timeout_s)
    return CapturedModel(model, budget, timeout_s, emit)


class CapturedModel(MeteredModel):
    """A metered model that emits a ModelCallFinished for each call."""

    def __init__(
        self, model: Model, budget: RunBudget, timeout_s: float | None, emit: Emit
    ) -> None:
        super().__init__(model, budget, timeout_s)
        self._emit = emit
        self._previous: list[Message] = []
        """The messages of the previous call."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        began = time.monotonic()
        try:
            reply = await super().complete(body, on_delta)
        except BackendError as error:
            await self._report(body, self.partial_completion, began, error.message)
            raise
        except asyncio.CancelledError:
            # No subscriber receives the event, so a cancelled run does not wait here.
            await self._report(body, self.partial_completion, began, "The call was cut off.")
            raise
        await self._report(body, reply, began)
        return reply

    async def _report(
        self,
        body: Mapping[str, Any],
        reply: Completion | None,
        began: float,
        error: str | None = None,
    ) -> None:
        messages = list(body["messages"])
        shared_prefix = common_length(self._previous, messages)
        self._previous = messages
        event = ModelCallFinished(
            shared_prefix=shared_prefix,
            messages=messages[shared_prefix:],
            settings={name: value for name, value in body.items() if name != "messages"},
            duration_s=time.monotonic() - began,
        )
        if reply:
            event = replace(
                event, reply=reply.message, finish_reason=reply.finish_reason, usage=reply.usage
            )
        try:
            await self._emit(replace(event, error=error))
        except Exception:
            log.exception("a model call cannot be captured")
            self._previous = []  # the next call repeats the messages


def common_length(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of messages at the start of both prompts that are the same objects."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one is not other:
            break
        length += 1
    return length
