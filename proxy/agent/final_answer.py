"""The visible answer of a run: taken from what the run produced, or requested in a separate model
call, and validated against the form that the client wants.

An answer with a form is held back until it is validated: text that was sent cannot be withdrawn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.to_process

from policies.answer_form import ANY_JSON, ANY_OBJECT, AnswerForm, answer_error, strip_code_fence
from policies.limits import StopReason
from policies.prompts import WHY_NO_MORE_TOOLS, corrected_answer_request
from proxy.agent.answer import AnswerWriter, read_answer_file
from proxy.agent.conversation import LOGPROBS_PARAMS, Conversation
from proxy.agent.events import Emit, ModelDelta, OnDelta, ToolCallDelta
from proxy.agent.history import text_of
from proxy.agent.model import Completion, refusal_of
from proxy.agent.prose import Prose, ProseRules
from proxy.agent.result import RunOutcome, RunWarning
from proxy.agent.status_hold import FirstCallProgress
from proxy.agent.task import AgentTask, out_of_time_error
from proxy.agent.tools import ToolExecutor
from proxy.agent.turn_stream import StreamHandler, stop_strings
from proxy.errors import BackendError
from sandbox_runtime.sandbox import Sandbox

CHECK_S = 20.0
"""Timeout of one validation against a client's schema, in seconds."""
CUT_OFF_FINISH_REASONS = ("length", "content_filter")


FORM_PARAMS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "json_schema",
        "guided_json",
        "guided_json_object",
        "guided_whitespace_pattern",
    }
)
"""Parameters that request a form. An answer that was written without them can be validated against
the form instead."""


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer that the client receives, with its finish reason, refusal and warnings, and the
    model's reply that contains it."""

    text: str
    finish_reason: str | None = None
    """The finish reason of the answer; None: that of the run."""
    reply: Completion | None = None
    """The complete reply that contains `text`, if there is one."""
    refusal: str | None = None
    warnings: tuple[RunWarning, ...] = ()


class BestAnswerFinder:
    """Finds the best answer of a run: the submitted answer, else an answer file, else the last
    prose.

    The final-answer call is made if there is none of these, if a limit has ended a run that used
    tools, or if the answer cannot satisfy the client's parameters. It is never made if `timeout_s`
    is None.
    """

    def __init__(
        self,
        task: AgentTask,
        outcome: RunOutcome,
        final_call: "FinalAnswerCall",
        timeout_s: float | None,
        *,
        takes_prose: bool,
        earlier_answer: str,
    ) -> None:
        """`timeout_s` is the timeout of the final-answer call; None: the call is not made.
        `takes_prose` is True if the model's last prose can be the answer without that call.
        `earlier_answer` is the text of the answer file from before the run was suspended, if the
        resumed run has requested no sandbox, or ""."""
        self._takes_prose = takes_prose
        self._earlier_answer = earlier_answer
        self._task = task
        self._outcome = outcome
        self._final_call = final_call
        self._timeout_s = timeout_s

    async def find(
        self, stop: StopReason, sandbox: Sandbox | None, *, has_used_tools: bool, is_plain: bool
    ) -> str:
        """Return the answer. `is_plain` is True if the client's parameters were sent with the call
        that wrote the answer. Raises BackendError, OutOfTimeError."""
        found = await self._produced_answer(sandbox)
        if found is not None and not (stop in WHY_NO_MORE_TOOLS and has_used_tools):
            adapted = (
                found
                if is_plain
                else await adapt_answer_to_params(self._task, found, self._outcome)
            )
            if adapted is not None:
                return adapted
        may_be_prose = self._timeout_s is not None or self._takes_prose
        return await self._request_answer(
            stop, found or (self._outcome.prose if may_be_prose else "")
        )

    async def _produced_answer(self, sandbox: Sandbox | None) -> str | None:
        outcome = self._outcome
        if outcome.submitted_answer:
            return outcome.submitted_answer
        if in_file := await read_answer_file(sandbox) if sandbox else "":
            return in_file
        if self._earlier_answer and outcome.submitted_answer is not None:
            return self._earlier_answer
        if outcome.prose_reply is None or not self._takes_prose:
            return None
        outcome.finish_reason = outcome.prose_reply.finish_reason
        outcome.choice = outcome.prose_reply.choice
        return outcome.prose

    async def _request_answer(self, stop: StopReason, fallback: str) -> str:
        if self._timeout_s is None:
            final_answer = await self._final_call.answer_without_call(fallback)
        else:
            final_answer = await self._final_call.answer(stop, fallback, self._timeout_s)
        outcome = self._outcome
        outcome.reply = final_answer.reply or outcome.reply
        outcome.choice = final_answer.reply.choice if final_answer.reply else outcome.choice
        outcome.finish_reason = final_answer.finish_reason or outcome.finish_reason
        outcome.refusal = final_answer.refusal
        outcome.warnings = final_answer.warnings
        return final_answer.text


class FinalAnswerCall:
    """The model call that requests the visible answer."""

    def __init__(
        self,
        task: AgentTask,
        conversation: Conversation,
        writer: AnswerWriter,
        executor: ToolExecutor,
        emit: Emit,
        first_call_progress: FirstCallProgress,
        rules: ProseRules,
    ) -> None:
        self._task = task
        self._conversation = conversation
        self._writer = writer
        self._executor = executor
        self._emit = emit
        self._first_call_progress = first_call_progress
        self._rules = rules
        self._last_text = ""
        """The last complete answer of the model."""
        self._handler: StreamHandler | None = None

    async def answer(self, stop: StopReason, fallback: str, timeout_s: float) -> FinalAnswer:
        """Return the model's answer, or `fallback` if there is none. After `timeout_s` seconds,
        return the text received so far, or else `fallback`.

        Raises OutOfTimeError after the timeout if there is neither. Raises BackendError if the call
        fails and either there is no fallback or a part of the answer was already sent."""
        await self._writer.begin_answer()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._complete_in_form(stop, fallback)
        except BackendError:
            if not fallback or self._writer.text:
                raise
            return await self._validate(FinalAnswer(fallback))
        except TimeoutError as error:
            if (
                best := self._writer.source_text
                or self._last_text
                or self._partial_text()
                or fallback
            ):
                return await self._validate(FinalAnswer(best, "length"))
            raise out_of_time_error(self._task) from error

    async def answer_without_call(self, answer: str) -> FinalAnswer:
        """Return `answer`, which may be empty, validated against the client's form. Make no model
        call."""
        return await self._validate(FinalAnswer(answer))

    async def _complete_in_form(self, stop: StopReason, fallback: str) -> FinalAnswer:
        final_answer = await self._complete(
            partial(self._conversation.complete_final_answer, stop), fallback
        )
        form = self._task.request.answer_form
        if (
            form is None
            or final_answer.refusal
            or final_answer.finish_reason in CUT_OFF_FINISH_REASONS
        ):
            return await self._write_held_deltas(final_answer)
        formed = await check_form(form, final_answer)
        if formed.finish_reason == "length":
            formed = await self._retry(form, formed)
        return await self._write_held_deltas(formed)

    async def _retry(self, form: AnswerForm, final_answer: FinalAnswer) -> FinalAnswer:
        """Request the answer again, with a message that says how `final_answer` violates the form.
        Return `final_answer` if the backend fails."""
        (warning,) = final_answer.warnings
        request = corrected_answer_request(warning.message, form)
        try:
            retried = await self._complete(
                partial(self._conversation.retry_final_answer, final_answer.text, request),
                final_answer.text,
            )
        except BackendError:
            return final_answer
        if retried.refusal or retried.finish_reason in CUT_OFF_FINISH_REASONS:
            return retried
        return await check_form(form, retried)

    async def _complete(
        self, call: Callable[[OnDelta], Awaitable[Completion]], fallback: str
    ) -> FinalAnswer:
        """Make the model call and stream its reply to the client. Return `fallback` if the reply is
        empty or repeats the proxy's own texts."""
        streams = self._task.request.stream
        may_show = streams and self._task.request.answer_form is None
        async with StreamHandler(
            self._emit,
            self._first_call_progress,
            self._writer,
            self._executor,
            Prose(self._rules),
            streams=streams,
            visibility="soon" if may_show else "never",
            shows_submit=False,
        ) as handler:
            self._handler = handler
            reply = await call(_ignore_tool_calls(handler.on_delta))
            await handler.end_without_calls(reply, is_answer=True)
        refusal = refusal_of(reply.message)
        is_echo = reply.stop_cause == "echo" or handler.prose.is_echo_at_end()
        text = "" if refusal or is_echo else text_of(reply.message).lstrip()
        if not text.strip() and not refusal:
            text = fallback
        self._last_text = text
        return FinalAnswer(text, reply.finish_reason, reply, refusal)

    def _partial_text(self) -> str:
        """Return the text of a reply that was cut off, as far as it arrived."""
        if self._handler is None or self._handler.prose.is_echo_at_end():
            return ""
        return self._handler.prose.text.strip()

    async def _write_held_deltas(self, final_answer: FinalAnswer) -> FinalAnswer:
        """Write the held-back deltas of the answer, unless validation has changed the text."""
        held = self._handler.prose.take_remaining_deltas() if self._handler else []
        if "".join(delta.text for delta in held) == final_answer.text:
            for delta in held:
                await self._writer.write(delta.text, self._executor.current_sandbox, delta.logprobs)
        return final_answer

    async def _validate(self, final_answer: FinalAnswer) -> FinalAnswer:
        form = self._task.request.answer_form
        return final_answer if form is None else await check_form(form, final_answer)


def _ignore_tool_calls(on_delta: OnDelta) -> OnDelta:
    """Return a callback that drops tool-call deltas, because the final-answer call offers no
    tools."""

    async def without_tool_calls(delta: ModelDelta) -> None:
        if not isinstance(delta, ToolCallDelta):
            await on_delta(delta)

    return without_tool_calls


async def check_form(
    form: AnswerForm, final_answer: FinalAnswer, timeout_s: float = CHECK_S
) -> FinalAnswer:
    """Validate an answer, without its code fence, against its form. A valid answer loses its code
    fence. An answer that violates the form keeps its text, and gets a warning and the finish reason
    "length", so that no client takes it for valid. If the validation takes more than `timeout_s`,
    the answer only gets a warning."""
    text = strip_code_fence(final_answer.text)
    try:
        fault = await _form_violation(form, text, timeout_s)
    except (TimeoutError, anyio.BrokenWorkerProcess):
        message = "The answer could not be checked against its schema: that took too long."
        return replace(final_answer, warnings=(RunWarning("response_format_unchecked", message),))
    if fault is None:
        return replace(final_answer, text=text)
    return replace(
        final_answer,
        finish_reason="length",
        warnings=(RunWarning("response_format_violated", fault),),
    )


async def _form_violation(form: AnswerForm, answer: str, timeout_s: float) -> str | None:
    if form in (ANY_OBJECT, ANY_JSON):
        return answer_error(form, answer)
    # In a process: a schema can make validation endless, and a thread cannot be killed.
    with anyio.fail_after(timeout_s):
        return await anyio.to_process.run_sync(answer_error, form, answer, cancellable=True)


async def adapt_answer_to_params(task: AgentTask, answer: str, outcome: RunOutcome) -> str | None:
    """Return the answer adapted to the client's parameters, or None if only a model call with these
    parameters can satisfy them."""
    form, unmet = task.request.answer_form, set(task.params.final) - {"stop"}
    if outcome.choice.get("logprobs"):
        unmet -= set(LOGPROBS_PARAMS)
    if form is not None and unmet & FORM_PARAMS:
        formed = await check_form(form, FinalAnswer(answer))
        if not formed.warnings:
            answer, unmet = formed.text, unmet - FORM_PARAMS
    if unmet:
        return None
    return _cut_at_stop(answer, stop_strings(task))


def _cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    ends = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
