"""Passes a turn's reply on while it arrives: as thinking, as narration or as the answer."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Literal, Self

from policies.repetition import RepetitionCheck
from proxy.agent.answer import AnswerWriter
from proxy.agent.client_calls import ClientCallStream
from proxy.agent.events import (
    CallAccepted,
    CallFailed,
    CallProgress,
    Emit,
    ModelDelta,
    Narration,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from proxy.agent.first_call import FirstCall
from proxy.agent.history import text_of, thoughts_in
from proxy.agent.model import MAX_CALLS, NoMoreAttempts, Reply, ReplyStopped
from proxy.agent.prose import HOLD_S, Prose
from proxy.agent.tool_calls import Turn
from proxy.agent.tools import Toolbox

Shows = Literal["at once", "soon", "never"]
"""When prose is shown as the answer while the reply goes on: as it comes; after HOLD_S or
HOLD_CHARS, whatever follows it; or not at all."""


class TurnListener:
    """Hears one turn. Prose is held back until it may be shown (see `Prose`); prose that a tool
    call follows was narration: it stays in the stream where it was shown already, and is reasoning
    where it was not."""

    def __init__(
        self,
        emit: Emit,
        first_call: FirstCall,
        writer: AnswerWriter,
        toolbox: Toolbox,
        prose: Prose,
        *,
        streams: bool,
        shows: Shows,
        shows_submit: bool,
        client_calls: ClientCallStream | None = None,
        tools: Collection[str] | None = None,
    ) -> None:
        """`streams`: whether thinking is passed on piece by piece; `shows_submit`: whether a
        submitted answer is, too; `client_calls` passes on the calls of the client's tools; calls
        of other tools than `tools` are ignored, if there is a limit to them."""
        self._emit = emit
        self._first_call = first_call
        self._writer = writer
        self._toolbox = toolbox
        self._streams = streams
        self._shows = shows
        self._shows_submit = shows_submit
        self._client_calls = client_calls
        self._tools = tools
        self._thinking = RepetitionCheck()
        self._has_shown = False
        self._called = False
        self._narration_is_over = False
        self._after_call: list[str] = []
        self._passing_on = asyncio.Lock()
        """Taken by who hears the pieces and by the timer."""
        self._timer: asyncio.Task[None] | None = None
        self._is_due = shows == "at once"
        self.prose = prose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the timer, so that nothing is shown after the turn."""
        if self._timer is not None:
            async with self._passing_on:
                self._timer.cancel()
            await asyncio.wait({self._timer})
            if not self._timer.cancelled() and (error := self._timer.exception()):
                raise error

    async def hear(self, delta: ModelDelta) -> None:
        """Take one piece in. Raises ReplyStopped where the reply has to end."""
        async with self._passing_on:
            match delta:
                case ReasoningDelta(text):
                    if self._streams:
                        self._has_shown = True
                        await self._emit(delta)
                    is_runaway = self.prose.rules.ends_replies and self._thinking.is_runaway(text)
                    if is_runaway and not self.has_begun_client_call:
                        raise ReplyStopped("runaway")
                case TextDelta(text) if self._called:
                    self._after_call.append(text)
                case TextDelta():
                    await self._hear_prose(delta)
                case ToolCallDelta(name=name) if self._tools is None or name in self._tools:
                    await self._hear_call(delta)
                case CallAccepted() | CallFailed():
                    await self._hear_progress(delta)

    async def _hear_progress(self, progress: CallProgress) -> None:
        """The call was accepted, or is made once more. Raises NoMoreAttempts where that would
        show."""
        await self._first_call.hear(progress)
        if isinstance(progress, CallFailed):
            if self._has_shown or self.prose.is_shown or (self._called and self._streams):
                raise NoMoreAttempts
            self._begin_again()

    def _begin_again(self) -> None:
        """Forget a reply of which nothing was shown."""
        self.prose, self._thinking = self.prose.begun_again(), RepetitionCheck()
        self._called, self._after_call = False, []
        self._is_due = self._shows == "at once"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _hear_prose(self, delta: TextDelta) -> None:
        try:
            self.prose.add(delta)
        finally:
            await self._show()
        if self._shows == "soon" and not self._is_due and self._timer is None:
            self._timer = asyncio.create_task(self._show_when_due())

    async def _show(self) -> None:
        if self._shows == "never":
            return
        for piece in self.prose.ready(is_due=self._is_due):
            await self._writer.write(piece.text, self._toolbox.computer, piece.logprobs)

    async def _show_when_due(self) -> None:
        await asyncio.sleep(HOLD_S)
        async with self._passing_on:
            self._is_due = True
            if not self._called:
                await self._show()

    async def _hear_call(self, delta: ToolCallDelta) -> None:
        if delta.index >= MAX_CALLS:
            raise ReplyStopped("many_calls")
        self._called = True
        if self._streams and (delta.arguments or delta.index):
            await self._end_narration(delta.name)
        if self._shows_submit and delta.index == 0 and self._toolbox.is_submit(delta.name):
            await self._writer.write_submit(delta.arguments, self._toolbox.computer)
        if self._client_calls is not None:
            await self._client_calls.hear(delta)

    @property
    def has_begun_client_call(self) -> bool:
        """Whether a call of a client's tool was passed on, if only in part."""
        return self._client_calls is not None and self._client_calls.has_begun

    async def _end_narration(self, called: str, *, as_text: bool = False) -> None:
        """Treat the prose before a call of the tool `called` as narration. `as_text`: what is
        held of it is the call itself."""
        if self._narration_is_over:
            return
        self._narration_is_over = True
        was_shown, rest = self.prose.is_shown, self.prose.rest()
        if was_shown and not as_text:
            for piece in rest:
                await self._writer.write(piece.text, self._toolbox.computer, piece.logprobs)
        if self._toolbox.is_submit(called):
            await self._writer.begin()
        else:
            await self._writer.set_aside()  # of an earlier turn, too, which announced the call
        if not was_shown:
            await self._narrate("".join(piece.text for piece in rest))

    async def _narrate(self, text: str) -> None:
        if text:
            await self._emit(Narration(text))

    async def end_with_calls(self, turn: Turn, reply: Reply) -> Mapping[str, str]:
        """The turn is over and has called tools: its prose was narration. Return the ids of the
        calls that were passed on to the client, by those in the turn."""
        if self._streams:
            await self._end_narration(turn.calls[0].name, as_text=turn.as_text)
            await self._narrate("".join(self._after_call))
        else:
            await think_aloud(reply, self._emit)
            await self._narrate("" if self.prose.is_echo_at_end() else text_of(reply.message))
        return await self._client_calls.end(turn) if self._client_calls else {}

    async def end_without_calls(self, reply: Reply, *, is_answer: bool) -> None:
        """The turn is over and has called nothing. Where its prose is the answer, who writes the
        answer goes on with it; else it is shown, as it may still come to be that."""
        if not self._streams:
            await think_aloud(reply, self._emit)
        elif not is_answer and self._shows != "never":
            for piece in self.prose.rest():
                await self._writer.write(piece.text, self._toolbox.computer, piece.logprobs)


async def think_aloud(reply: Reply, emit: Emit) -> None:
    """Pass on the thinking of a reply that was not streamed."""
    for thought in thoughts_in(reply.message):
        await emit(ReasoningDelta(thought))
