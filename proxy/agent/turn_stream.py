"""Passes the reply of one turn on while it arrives: as thinking, as narration, as the answer, or as
calls of the client's own tools."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, Self

from policies.redaction import SecretFinder
from policies.reply_checks import RepetitionCheck
from proxy.agent.answer import AnswerWriter
from proxy.agent.events import (
    CallAccepted,
    CallFailed,
    CallProgress,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Emit,
    ModelDelta,
    Narration,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from proxy.agent.history import text_of, thoughts_in
from proxy.agent.model import MAX_CALLS, Completion, CompletionStopped, StopRetryingError
from proxy.agent.prose import HOLD_S, Prose
from proxy.agent.task import AgentTask, StatusHold
from proxy.agent.tool_calls import TextArgument, Turn
from proxy.agent.tools import ToolExecutor

Shows = Literal["at once", "soon", "never"]
"""When prose is shown as the answer while the reply goes on: as it comes; after HOLD_S or
HOLD_CHARS, whatever follows it; or not at all."""


class StreamHandler:
    """Passes on the pieces of one turn. Prose is held back until it may be shown (see `Prose`).
    Prose before a tool call was narration: it stays in the stream if it was shown already, and
    becomes reasoning if it was not."""

    def __init__(
        self,
        emit: Emit,
        first_call: "FirstCall",
        writer: AnswerWriter,
        toolbox: ToolExecutor,
        prose: Prose,
        *,
        streams: bool,
        shows: Shows,
        shows_submit: bool,
        client_calls: "ClientCallStream | None" = None,
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
        """Held while a piece, or the timer, is handled."""
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
        """Take one piece in. Raises CompletionStopped if the reply has to end."""
        async with self._passing_on:
            match delta:
                case ReasoningDelta(text):
                    if self._streams:
                        self._has_shown = True
                        await self._emit(delta)
                    is_runaway = self.prose.rules.ends_replies and self._thinking.is_runaway(text)
                    if is_runaway and not self.has_begun_client_call:
                        raise CompletionStopped("runaway")
                case TextDelta(text) if self._called:
                    self._after_call.append(text)
                case TextDelta():
                    await self._hear_prose(delta)
                case ToolCallDelta(name=name) if self._tools is None or name in self._tools:
                    await self._hear_call(delta)
                case CallAccepted() | CallFailed():
                    await self._hear_progress(delta)

    async def _hear_progress(self, progress: CallProgress) -> None:
        """Note that the call was accepted, or is made once more. Raises StopRetryingError if the
        client would see that."""
        await self._first_call.hear(progress)
        if isinstance(progress, CallFailed):
            if self._has_shown or self.prose.is_shown or (self._called and self._streams):
                raise StopRetryingError
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
            raise CompletionStopped("many_calls")
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

    async def end_with_calls(self, turn: Turn, reply: Completion) -> Mapping[str, str]:
        """End a turn that has called tools: its prose was narration. Return the ids of the calls
        that were passed on to the client, by their ids in the turn."""
        if self._streams:
            await self._end_narration(turn.calls[0].name, as_text=turn.as_text)
            await self._narrate("".join(self._after_call))
        else:
            await emit_reasoning(reply, self._emit)
            await self._narrate("" if self.prose.is_echo_at_end() else text_of(reply.message))
        return await self._client_calls.end(turn) if self._client_calls else {}

    async def end_without_calls(self, reply: Completion, *, is_answer: bool) -> None:
        """End a turn that has called nothing. Prose that is the answer is left to the caller, who
        writes all of it; other prose is shown, for it may still become the answer."""
        if not self._streams:
            await emit_reasoning(reply, self._emit)
        elif not is_answer and self._shows != "never":
            for piece in self.prose.rest():
                await self._writer.write(piece.text, self._toolbox.computer, piece.logprobs)


async def emit_reasoning(reply: Completion, emit: Emit) -> None:
    """Pass on the thinking of a reply that was not streamed."""
    for thought in thoughts_in(reply.message):
        await emit(ReasoningDelta(thought))


class ClientCallStream:
    """Emits the calls of one turn, piece by piece.

    What was sent cannot be taken back, so a call is begun only where the client is certain to get
    it: not after a call of `submit`, which may end the run. Calls are sent one after the other; a
    call whose pieces come between those of another is left for the end of the run.
    """

    def __init__(
        self,
        emit: Emit,
        toolbox: ToolExecutor,
        names: Collection[str],
        free_text: Collection[str],
        new_id: Iterator[str],
    ) -> None:
        """`names` are those of the client's tools; of a call of a `free_text` tool the one text in
        its arguments is sent; `new_id` makes the ids that the client is sent."""
        self._emit = emit
        self._toolbox = toolbox
        self._names = names
        self._free_text = free_text
        self._new_id = new_id
        self._called: dict[int, str] = {}
        """The name of each call of the turn, by its place."""
        self._ids: dict[int, str] = {}
        """The id of each call that was begun, by its place."""
        self._decided = set[int]()
        """The places of the calls that were begun, or left for the end of the run."""
        self._open: int | None = None
        """The place of the call that is being sent."""
        self._written: defaultdict[int, list[str]] = defaultdict(list)
        """The arguments of each call so far, by its place."""
        self._texts: dict[int, TextArgument] = {}
        """The texts of the calls of `free_text` tools, by their places."""
        self._holds = False
        """Whether no further call is begun."""

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent."""
        return bool(self._ids)

    async def hear(self, delta: ToolCallDelta) -> None:
        """Take in a piece of any call of the turn, and pass it on if it may be."""
        self._called[delta.index] = delta.name
        if self._toolbox.is_submit(delta.name):
            self._holds = True
        if not delta.arguments:
            return  # the name need not be whole yet
        self._written[delta.index].append(delta.arguments)
        text = self._shown(delta)
        if text and (delta.index == self._open or await self._begin(delta)):
            await self._emit(ClientCallDelta(self._index(delta.index), text))

    async def end(self, turn: Turn) -> Mapping[str, str]:
        """End the turn. Return the calls' ids as the client has them, by the turn's own ids."""
        await self._finish()
        return {
            call.id: self._ids[place]
            for place, call in enumerate(turn.calls)
            if place in self._ids and call.name == self._called[place]
        }

    def _shown(self, delta: ToolCallDelta) -> str:
        """Return what the client is sent of a piece."""
        if delta.name not in self._free_text:
            return delta.arguments
        text = self._texts.setdefault(delta.index, TextArgument("input"))
        return text.feed(delta.arguments)

    async def _begin(self, delta: ToolCallDelta) -> bool:
        """Begin a call. Return False where that cannot be, or has been."""
        place, name = delta.index, delta.name
        if self._holds or place in self._decided:
            return False
        self._decided.add(place)
        takes_text = name in self._free_text
        is_object = takes_text or delta.arguments.lstrip().startswith("{")
        if not is_object or name not in self._names:
            return False
        opened = self._open
        if opened is not None and (place < opened or not _is_json(self._written[opened])):
            self._holds = True
            return False
        await self._finish()
        self._open, self._ids[place] = place, next(self._new_id)
        started = ClientCallStarted(self._index(place), self._ids[place], name, takes_text)
        await self._emit(started)
        return True

    async def _finish(self) -> None:
        if self._open is not None:
            await self._emit(ClientCallFinished(self._index(self._open)))
        self._open = None

    def _index(self, place: int) -> int:
        """Return the place of a call among the client's calls of the turn."""
        return sum(name in self._names for at, name in self._called.items() if at < place)


def client_call_stream(
    task: AgentTask,
    emit: Emit,
    toolbox: ToolExecutor,
    names: Collection[str],
    new_id: Iterator[str],
) -> ClientCallStream | None:
    """Return the stream for one turn's calls; None if the client gets them when the run ends: it
    speaks of `functions`, or secrets are taken out of what it is sent."""
    if not names or task.request.legacy_state is not None or SecretFinder(task.profile.redact):
        return None
    return ClientCallStream(emit, toolbox, names, task.request.text_tools, new_id)


def _is_json(pieces: Collection[str]) -> bool:
    try:
        json.loads("".join(pieces))
    except (ValueError, RecursionError):
        return False
    return True


class FirstCall:
    """Emits the progress of a run's first model call, for which the status of a streamed response
    waits, and ends its attempts when the time for them is up."""

    def __init__(self, hold: StatusHold | None, emit: Emit) -> None:
        self._hold = hold
        self._emit = emit
        self._is_accepted = False

    async def hear(self, progress: CallProgress) -> None:
        """Pass on the progress of a call, if the call is the first. Raises StopRetryingError."""
        if self._is_accepted:
            return
        await self._emit(progress)
        if isinstance(progress, CallAccepted):
            self._is_accepted = True
        elif self._hold and not self._hold.has_time_for_attempt(progress.retry_in_s):
            raise StopRetryingError
