"""The visible answer of a run: found, or asked for in a model call of its own, and checked against
the form that the client wants.

An answer with a form is held back until it is checked: what was sent cannot be taken back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import anyio.to_process

from policies.answer_form import ANY_JSON, ANY_OBJECT, AnswerForm, answer_error, strip_code_fence
from policies.limits import StopReason
from policies.prompts import INSTRUCTIONS, WHY_NO_MORE_TOOLS, form_request
from proxy.agent.answer import AnswerWriter, answer_file
from proxy.agent.conversation import WITH_TURNS, Conversation
from proxy.agent.events import Emit, ModelDelta, OnDelta, ToolCallDelta
from proxy.agent.history import text_of
from proxy.agent.model import Completion, Message, refusal_of
from proxy.agent.outcome import RunOutcome
from proxy.agent.prose import Prose, ProseRules, own_texts
from proxy.agent.result import RunWarning
from proxy.agent.task import AgentTask, out_of_time
from proxy.agent.tools import ToolExecutor, tool_name
from proxy.agent.turn_stream import FirstCall, Shows, StreamHandler
from proxy.errors import BackendError
from sandbox_runtime.sandbox import Sandbox

CHECK_S = 20.0
"""How long one check against a client's schema may take."""
CUT_SHORT = ("length", "content_filter")


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The visible answer."""

    text: str
    finish_reason: str | None = None
    """None: the run's own stays."""
    reply: Completion | None = None
    """The reply that contains it."""
    refusal: str | None = None
    warnings: tuple[RunWarning, ...] = ()


class FinalCall:
    """Asks the model for the visible answer."""

    def __init__(
        self,
        task: AgentTask,
        talk: Conversation,
        writer: AnswerWriter,
        toolbox: ToolExecutor,
        emit: Emit,
        first_call: FirstCall,
        rules: ProseRules,
    ) -> None:
        self._task = task
        self._talk = talk
        self._writer = writer
        self._toolbox = toolbox
        self._emit = emit
        self._first_call = first_call
        self._rules = rules
        self._last_text = ""
        """The last answer of the model that came whole."""
        self._listener: StreamHandler | None = None

    async def answer(self, stop: StopReason, fallback: str, seconds: float) -> FinalAnswer:
        """Return the model's answer, or `fallback` if there is none. Raises BackendError."""
        await self._writer.begin()
        try:
            async with asyncio.timeout(seconds):
                return await self._asked(stop, fallback)
        except BackendError:
            if not fallback or self._writer.text:
                raise
            return await self._as_it_is(FinalAnswer(fallback))
        except TimeoutError as error:
            if best := self._writer.given or self._last_text or self._unfinished() or fallback:
                return await self._as_it_is(FinalAnswer(best, "length"))
            raise out_of_time(self._task) from error

    async def unasked(self, answer: str) -> FinalAnswer:
        """Return the run's own answer, which may be empty, without asking the model."""
        return await self._as_it_is(FinalAnswer(answer))

    async def _asked(self, stop: StopReason, fallback: str) -> FinalAnswer:
        final = await self._heard(partial(self._talk.ask_final, stop), fallback)
        form = self._task.request.answer_form
        if form is None or final.refusal or final.finish_reason in CUT_SHORT:
            return await self._released(final)
        formed = await in_form(form, final)
        if formed.finish_reason == "length":
            formed = await self._mended(form, formed)
        return await self._released(formed)

    async def _mended(self, form: AnswerForm, final: FinalAnswer) -> FinalAnswer:
        """Ask once more, naming what the form lacks. Return the first answer if that fails."""
        (warning,) = final.warnings
        request = form_request(warning.message, form)
        try:
            again = await self._heard(
                partial(self._talk.ask_again, final.text, request), final.text
            )
        except BackendError:
            return final
        if again.refusal or again.finish_reason in CUT_SHORT:
            return again
        return await in_form(form, again)

    async def _heard(
        self, ask: Callable[[OnDelta], Awaitable[Completion]], fallback: str
    ) -> FinalAnswer:
        """Ask for the answer and pass it on. Return `fallback` if the reply is empty or repeats the
        proxy's own texts."""
        shows: Shows = (
            "soon"
            if self._task.request.stream and self._task.request.answer_form is None
            else "never"
        )
        async with StreamHandler(
            self._emit,
            self._first_call,
            self._writer,
            self._toolbox,
            Prose(self._rules),
            streams=self._task.request.stream,
            shows=shows,
            shows_submit=False,
        ) as listener:
            self._listener = listener
            reply = await ask(_but_calls(listener.hear))
            await listener.end_without_calls(reply, is_answer=True)
        refusal = refusal_of(reply.message)
        is_echo = reply.stopped == "echo" or listener.prose.is_echo_at_end()
        text = "" if refusal or is_echo else text_of(reply.message).lstrip()
        if not text.strip() and not refusal:
            text = fallback
        self._last_text = text
        return FinalAnswer(text, reply.finish_reason, reply, refusal)

    def _unfinished(self) -> str:
        """Return what has come of a reply that was cut off."""
        if self._listener is None or self._listener.prose.is_echo_at_end():
            return ""
        return self._listener.prose.text.strip()

    async def _released(self, final: FinalAnswer) -> FinalAnswer:
        """Write what was held back of the answer, in the pieces it came in."""
        held = self._listener.prose.rest() if self._listener else []
        if "".join(delta.text for delta in held) == final.text:
            for delta in held:
                await self._writer.write(delta.text, self._toolbox.computer, delta.logprobs)
        return final

    async def _as_it_is(self, final: FinalAnswer) -> FinalAnswer:
        form = self._task.request.answer_form
        return final if form is None else await in_form(form, final)


def _but_calls(hear: OnDelta) -> OnDelta:
    """Return a listener that passes everything to `hear` but tool calls, which a call without tools
    cannot make."""

    async def hear_words(delta: ModelDelta) -> None:
        if not isinstance(delta, ToolCallDelta):
            await hear(delta)

    return hear_words


FORMS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "json_schema",
        "guided_json",
        "guided_json_object",
        "guided_whitespace_pattern",
    }
)
"""Parameters that ask for a form, which can be checked if the task has one."""
SHOWN_AS_IT_COMES = frozenset({"stop", *WITH_TURNS})
"""Parameters of the visible answer that any turn's prose can satisfy while it is written."""


def when_shown(task: AgentTask) -> Shows:
    """Return how soon the prose of a turn may be shown as the answer."""
    needs_call = task.params.final.keys() - SHOWN_AS_IT_COMES
    must_wait = task.delivery.narration == "reasoning" or needs_call
    return "never" if must_wait or not task.request.stream else "soon"


async def fitting_answer(task: AgentTask, found: str, outcome: RunOutcome) -> str | None:
    """Return an answer as the client's parameters want it, or None if only a model call with these
    parameters can give that."""
    form, unmet = task.request.answer_form, set(task.params.final) - {"stop"}
    if outcome.choice.get("logprobs"):
        unmet -= set(WITH_TURNS)
    if form is not None and unmet & FORMS:
        formed = await in_form(form, FinalAnswer(found))
        if not formed.warnings:
            found, unmet = formed.text, unmet - FORMS
    if unmet:
        return None
    return _up_to_stop(found, stop_strings(task))


def stop_strings(task: AgentTask) -> tuple[str, ...]:
    """The client's stop strings."""
    stop = task.params.final.get("stop")
    given = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(each for each in given if isinstance(each, str) and each)


def _up_to_stop(text: str, stops: Sequence[str]) -> str:
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def prose_rules(
    task: AgentTask,
    messages: Sequence[Message],
    words: str,
    tools: Sequence[Mapping[str, Any]],
) -> ProseRules:
    """Return the rules for the visible prose of a run that sends these words and tools beside the
    client's messages."""
    limits = [n for n in task.params.token_limits.values() if isinstance(n, int) and n > 0]
    descriptions = tuple(str(tool["function"].get("description", "")) for tool in tools)
    return ProseRules(
        max_tokens=min(limits, default=None),
        stops=stop_strings(task),
        own=own_texts((words, *descriptions), INSTRUCTIONS),
        client_texts=[text_of(message) for message in messages],
        tool_names=[tool_name(tool) for tool in (*tools, *task.request.client_tools)],
    )


class BestAnswer:
    """Finds the best answer of a run: submitted, in an answer file, the last prose, or asked for.
    The model is asked first if tools have run and a limit has ended the run, or if the answer does
    not satisfy the client's parameters."""

    def __init__(
        self,
        task: AgentTask,
        outcome: RunOutcome,
        call: FinalCall,
        seconds: float | None,
        *,
        takes_prose: bool,
    ) -> None:
        """`seconds`: how long asking the model may take; None: it is not asked. `takes_prose`:
        whether the model's prose can be the answer."""
        self._takes_prose = takes_prose
        self._task = task
        self._outcome = outcome
        self._call = call
        self._seconds = seconds

    async def find(
        self, stop: StopReason, computer: Sandbox | None, *, has_worked: bool, is_plain: bool
    ) -> str:
        """Return the answer, or "" if the run ends in client tool calls or a refusal. `is_plain`:
        the client's parameters went with the call that wrote the answer."""
        ends_bare = stop in (StopReason.CLIENT_TOOL_CALLS, StopReason.REFUSED)
        if ends_bare or self._outcome.has_cut_call:
            return ""
        found = await self._found(computer)
        if found is not None and not (stop in WHY_NO_MORE_TOOLS and has_worked):
            fitting = found if is_plain else await fitting_answer(self._task, found, self._outcome)
            if fitting is not None:
                return fitting
        may_be_prose = self._seconds is not None or self._takes_prose
        return await self._asked(stop, found or (self._outcome.prose if may_be_prose else ""))

    async def _found(self, computer: Sandbox | None) -> str | None:
        outcome = self._outcome
        if outcome.submitted:
            return outcome.submitted
        if in_file := await answer_file(computer) if computer else "":
            return in_file
        if outcome.prose_reply is None or not self._takes_prose:
            return None
        outcome.finish_reason = outcome.prose_reply.finish_reason
        outcome.choice = outcome.prose_reply.choice
        return outcome.prose

    async def _asked(self, stop: StopReason, fallback: str) -> str:
        if self._seconds is None:
            final = await self._call.unasked(fallback)
        else:
            final = await self._call.answer(stop, fallback, self._seconds)
        outcome = self._outcome
        outcome.reply = final.reply or outcome.reply
        outcome.choice = final.reply.choice if final.reply else outcome.choice
        outcome.finish_reason = final.finish_reason or outcome.finish_reason
        outcome.refusal = final.refusal
        outcome.warnings = final.warnings
        return final.text


async def in_form(form: AnswerForm, final: FinalAnswer, seconds: float = CHECK_S) -> FinalAnswer:
    """Strip the code fence from an answer and check it against its form. An answer that fails gets
    a notice and the finish reason of one that was cut off, so that no client takes it for valid.
    """
    text = strip_code_fence(final.text)
    try:
        fault = await _fault(form, text, seconds)
    except (TimeoutError, anyio.BrokenWorkerProcess):
        words = "The answer could not be checked against its schema: that took too long."
        return replace(final, warnings=(RunWarning("response_format_unchecked", words),))
    if fault is None:
        return replace(final, text=text)
    return replace(
        final, finish_reason="length", warnings=(RunWarning("response_format_violated", fault),)
    )


async def _fault(form: AnswerForm, answer: str, seconds: float) -> str | None:
    if form in (ANY_OBJECT, ANY_JSON):
        return answer_error(form, answer)
    # In a process, for a schema can make a check endless, and a thread could not be ended.
    with anyio.fail_after(seconds):
        return await anyio.to_process.run_sync(answer_error, form, answer, cancellable=True)
