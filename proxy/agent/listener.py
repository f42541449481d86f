"""What one turn's pieces mean while they arrive: thinking, narration, or already the answer."""

from typing import Any

from proxy.agent.answer import AnswerWriter
from proxy.agent.events import Emit, ModelDelta, Narration, ReasoningDelta, TextDelta, ToolCallDelta
from proxy.agent.history import thoughts_in
from proxy.agent.model import Reply
from proxy.agent.tool_calls import may_call
from proxy.agent.toolbox import Toolbox

LIVE_PROSE_CHARS = 1000
"""Narration before a tool call is shorter than this; longer prose is taken for the answer."""


class TurnListener:
    """Hears a turn with tools. Prose is held back until it shows whether it is the answer: text
    that a tool call follows is narration, and clients show that as thinking. Where no tool was used
    yet, so that no file can hold a better answer, long prose is passed on as it comes."""

    def __init__(
        self, emit: Emit, writer: AnswerWriter, toolbox: Toolbox, *, answer_live: bool
    ) -> None:
        self._emit = emit
        self._writer = writer
        self._toolbox = toolbox
        self._answer_live = answer_live
        self._prose_live = answer_live and toolbox.computer is None
        self._released = False
        self._held = ""
        self._calls_began = False

    async def hear(self, delta: ModelDelta) -> None:
        """Take one piece in."""
        match delta:
            case ReasoningDelta():
                await self._emit(delta)
            case TextDelta(text, logprobs):
                await self._hear_prose(text, logprobs)
            case ToolCallDelta(index, name, arguments):
                await self._end_prose()
                if index == 0 and self._toolbox.is_submit(name) and self._answer_live:
                    await self._writer.write_submit(arguments, self._toolbox.computer)

    async def _hear_prose(self, text: str, logprobs: Any) -> None:
        if self._released and not self._calls_began:
            await self._writer.write(text, self._toolbox.computer, logprobs)
            return
        self._held += text
        if self._calls_began:
            await self.narrate()
        elif self._prose_live and len(self._held) > LIVE_PROSE_CHARS and not may_call(self._held):
            self._released = True
            held, self._held = self._held.lstrip(), ""
            await self._writer.write(held, self._toolbox.computer, logprobs)

    async def _end_prose(self) -> None:
        if not self._calls_began:
            self._calls_began = True
            await self._writer.begin()  # what was passed on was not the answer after all
        await self.narrate()

    async def narrate(self) -> None:
        """What was held back is not the answer."""
        text, self._held = self._held, ""
        if text:
            await self._emit(Narration(text))

    async def hear_whole(self, reply: Reply, *, narration: str) -> None:
        """The same for a reply that was not streamed."""
        await think_aloud(reply, self._emit)
        if narration:
            await self._emit(Narration(narration))


async def think_aloud(reply: Reply, emit: Emit) -> None:
    """Pass on the thinking of a reply that was not streamed."""
    for thought in thoughts_in(reply.message):
        await emit(ReasoningDelta(thought))
