"""The visible answer where it is asked for, in a call of its own: held to the form it must have.

An answer of a given form is held back until it was checked: what was sent cannot be taken back.
"""

import asyncio
from dataclasses import dataclass, replace

import anyio
import anyio.to_process

from policies.answer_form import ANY_JSON, ANY_OBJECT, AnswerForm, answer_fault, unfenced
from policies.limits import StopReason
from policies.prompts import form_request
from proxy.agent.answer import AnswerWriter
from proxy.agent.conversation import Conversation
from proxy.agent.events import Emit, ModelDelta, OnDelta, ReasoningDelta, TextDelta
from proxy.agent.history import text_of
from proxy.agent.listener import think_aloud
from proxy.agent.model import Message, Reply
from proxy.agent.task import Notice, Task
from proxy.agent.toolbox import Toolbox
from proxy.errors import BackendError, OutOfTimeError

CHECK_S = 20.0
"""How long one check against a client's schema may take."""
CUT_SHORT = ("length", "content_filter")


@dataclass(frozen=True, slots=True)
class Final:
    """The visible answer."""

    text: str
    finish_reason: str | None = None
    """None: as it was before it was asked for."""
    reply: Reply | None = None
    """What it came in."""
    refusal: str | None = None
    notices: tuple[Notice, ...] = ()


class FinalCall:
    """Asks for the answer."""

    def __init__(
        self, task: Task, talk: Conversation, writer: AnswerWriter, toolbox: Toolbox, emit: Emit
    ) -> None:
        self._task = task
        self._talk = talk
        self._writer = writer
        self._toolbox = toolbox
        self._emit = emit
        self._held: list[TextDelta] = []
        self._heard_so_far = ""

    async def answer(self, stop: StopReason, fallback: str, seconds: float) -> Final:
        """The answer, or `fallback` where none comes. Raises BackendError."""
        await self._writer.begin()
        try:
            async with asyncio.timeout(seconds):
                return await self._asked(stop, fallback)
        except BackendError:
            if not fallback or self._writer.text:
                raise
            return await self._as_it_is(Final(fallback))
        except TimeoutError as error:
            if best := self._writer.given or self._heard_so_far or fallback:
                return await self._as_it_is(Final(best, "length"))
            raise OutOfTimeError("the model did not answer in time") from error

    async def _asked(self, stop: StopReason, fallback: str) -> Final:
        final = await self._heard(await self._talk.ask_final(stop, self._listener()), fallback)
        form = self._task.form
        if form is None or final.refusal or final.finish_reason in CUT_SHORT:
            return await self._released(final)
        formed = await in_form(form, final)
        if formed.finish_reason == "length":
            formed = await self._mended(form, formed)
        return await self._released(formed)

    async def _mended(self, form: AnswerForm, final: Final) -> Final:
        """The answer asked for once more, its writer told what it lacks."""
        (notice,) = final.notices
        request = form_request(notice.message, form)
        try:
            reply = await self._talk.ask_again(final.text, request, self._listener())
        except BackendError:
            return final
        again = await self._heard(reply, final.text)
        if again.refusal or again.finish_reason in CUT_SHORT:
            return again
        return await in_form(form, again)

    async def _heard(self, reply: Reply, fallback: str) -> Final:
        if not self._task.stream:
            await think_aloud(reply, self._emit)
        refusal = refusal_of(reply.message)
        text = "" if refusal else text_of(reply.message)
        if not text.strip() and not refusal:
            text = fallback
        self._heard_so_far = text
        return Final(text, reply.finish_reason, reply, refusal)

    async def _released(self, final: Final) -> Final:
        """Pass on what was held back of it, in the pieces it came in."""
        held, self._held = self._held, []
        if "".join(delta.text for delta in held) == final.text:
            for delta in held:
                await self._writer.write(delta.text, self._toolbox.computer, delta.logprobs)
        return final

    async def _as_it_is(self, final: Final) -> Final:
        form = self._task.form
        return final if form is None else await in_form(form, final)

    def _listener(self) -> OnDelta | None:
        self._held = []
        return self._hear if self._task.stream else None

    async def _hear(self, delta: ModelDelta) -> None:
        if isinstance(delta, ReasoningDelta):
            await self._emit(delta)
        elif isinstance(delta, TextDelta) and self._task.form is not None:
            self._held.append(delta)
        elif isinstance(delta, TextDelta):
            await self._writer.write(delta.text, self._toolbox.computer, delta.logprobs)


async def in_form(form: AnswerForm, final: Final, seconds: float = CHECK_S) -> Final:
    """The answer, without what models put around JSON; and a notice where it is not in its form.

    Such an answer ends as one that was cut off does, so that nobody takes it for what was asked.
    """
    text = unfenced(final.text)
    try:
        fault = await _fault(form, text, seconds)
    except (TimeoutError, anyio.BrokenWorkerProcess):
        words = "The answer could not be checked against its schema: that took too long."
        return replace(final, notices=(Notice("response_format_unchecked", words),))
    if fault is None:
        return replace(final, text=text)
    return replace(
        final, finish_reason="length", notices=(Notice("response_format_violated", fault),)
    )


async def _fault(form: AnswerForm, answer: str, seconds: float) -> str | None:
    if form in (ANY_OBJECT, ANY_JSON):
        return answer_fault(form, answer)
    # In a process, for a schema can make a check endless, and a thread could not be ended.
    with anyio.fail_after(seconds):
        return await anyio.to_process.run_sync(answer_fault, form, answer, cancellable=True)


def refusal_of(message: Message) -> str | None:
    """What the model said instead of an answer, where it declined in the field for it."""
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) and refusal else None
