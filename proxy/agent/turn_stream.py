"""The reply of one turn, emitted while it arrives: as reasoning, as narration, as the answer, or as
calls of the client's own tools. `prose_visibility` and `prose_rules` determine how prose is
sent."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from policies.prompts import INSTRUCTIONS
from policies.redaction import SecretFinder
from policies.reply_checks import RepetitionCheck
from proxy.agent.answer import AnswerWriter
from proxy.agent.conversation import LOGPROBS_PARAMS
from proxy.agent.events import (
    CallProgress,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Emit,
    ModelCallAccepted,
    ModelCallFailed,
    ModelDelta,
    Narration,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from proxy.agent.history import reasoning_texts, text_of
from proxy.agent.model import MAX_CALLS, Completion, CompletionStopped, Message, StopRetryingError
from proxy.agent.prose import HOLD_S, Prose, ProseRules, build_proxy_texts
from proxy.agent.status_hold import FirstCallProgress
from proxy.agent.task import AgentTask
from proxy.agent.tool_calls import TextArgumentReader, Turn
from proxy.agent.tools import ToolExecutor, tool_name

ProseVisibility = Literal["at once", "soon", "never"]
"""The time at which prose is sent as the answer while the reply still arrives: immediately; after
HOLD_S or HOLD_CHARS; or not before the reply is complete."""
_STREAMABLE_PARAMS = frozenset({"stop", *LOGPROBS_PARAMS})
"""Parameters of the visible answer that the prose of any turn can satisfy while it streams."""


class StreamHandler:
    """Emits the deltas of one turn. Prose is held back until it may be shown (see `Prose`). Prose
    before a tool call is narration: it stays in the stream if it was shown already, and is emitted
    as reasoning otherwise."""

    def __init__(
        self,
        emit: Emit,
        first_call_progress: FirstCallProgress,
        writer: AnswerWriter,
        executor: ToolExecutor,
        prose: Prose,
        *,
        streams: bool,
        visibility: ProseVisibility,
        shows_submit: bool,
        client_calls: "ClientCallStream | None" = None,
        allowed_tools: Collection[str] | None = None,
    ) -> None:
        """If `streams` is True, reasoning is emitted as it arrives, and narration when the tool
        call after it begins. Otherwise both are emitted at the end of the turn.

        If `shows_submit` is True, the answer in a call of `submit` is emitted as it arrives.
        `visibility` determines when prose is sent as the answer. `client_calls` emits the calls of
        the client's tools. Calls of tools that are not in `allowed_tools` are ignored; None allows
        all tools.
        """
        self._emit = emit
        self._first_call_progress = first_call_progress
        self._writer = writer
        self._executor = executor
        self._streams = streams
        self._visibility = visibility
        self._shows_submit = shows_submit
        self._client_calls = client_calls
        self._allowed_tools = allowed_tools
        self._reasoning_check = RepetitionCheck()
        self._has_emitted_reasoning = False
        self._has_begun_call = False
        self._has_ended_narration = False
        self._text_after_call: list[str] = []
        self._lock = asyncio.Lock()
        """Held while a delta or the timer is handled."""
        self._timer: asyncio.Task[None] | None = None
        self._is_hold_over = visibility == "at once"
        self.prose = prose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the timer, so that nothing is emitted after the turn."""
        if self._timer is not None:
            async with self._lock:
                self._timer.cancel()
            await asyncio.wait({self._timer})
            if not self._timer.cancelled() and (error := self._timer.exception()):
                raise error

    async def on_delta(self, delta: ModelDelta) -> None:
        """Handle one delta. Raises CompletionStopped if the reply has to end, StopRetryingError if
        a failed attempt must not be retried."""
        async with self._lock:
            match delta:
                case ReasoningDelta(text):
                    if self._streams:
                        self._has_emitted_reasoning = True
                        await self._emit(delta)
                    is_runaway = (
                        self.prose.rules.ends_replies and self._reasoning_check.add_and_check(text)
                    )
                    if is_runaway and not self.has_begun_client_call:
                        raise CompletionStopped("runaway")
                case TextDelta(text) if self._has_begun_call:
                    self._text_after_call.append(text)
                case TextDelta():
                    await self._on_text(delta)
                case ToolCallDelta(name=name) if (
                    self._allowed_tools is None or name in self._allowed_tools
                ):
                    await self._on_tool_call(delta)
                case ModelCallAccepted() | ModelCallFailed():
                    await self._on_progress(delta)

    async def _on_progress(self, progress: CallProgress) -> None:
        """Handle an accepted or failed attempt. Raises StopRetryingError if the client has already
        seen a part of the failed attempt's reply."""
        await self._first_call_progress.on_progress(progress)
        if isinstance(progress, ModelCallFailed):
            if (
                self._has_emitted_reasoning
                or self.prose.is_shown
                or (self._has_begun_call and self._streams)
            ):
                raise StopRetryingError
            self._reset()

    def _reset(self) -> None:
        """Discard the failed attempt's reply, of which nothing was shown."""
        self.prose, self._reasoning_check = self.prose.empty_with_same_rules(), RepetitionCheck()
        self._has_begun_call, self._text_after_call = False, []
        self._is_hold_over = self._visibility == "at once"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _on_text(self, delta: TextDelta) -> None:
        try:
            self.prose.add(delta)
        finally:
            await self._write_ready_prose()
        if self._visibility == "soon" and not self._is_hold_over and self._timer is None:
            self._timer = asyncio.create_task(self._write_ready_prose_after_hold())

    async def _write_ready_prose(self) -> None:
        if self._visibility == "never":
            return
        for piece in self.prose.take_ready_deltas(is_hold_over=self._is_hold_over):
            await self._writer.write(piece.text, self._executor.current_sandbox, piece.logprobs)

    async def _write_ready_prose_after_hold(self) -> None:
        await asyncio.sleep(HOLD_S)
        async with self._lock:
            self._is_hold_over = True
            if not self._has_begun_call:
                await self._write_ready_prose()

    async def _on_tool_call(self, delta: ToolCallDelta) -> None:
        if delta.index >= MAX_CALLS:
            raise CompletionStopped("many_calls")
        self._has_begun_call = True
        if self._streams and (delta.arguments or delta.index):
            await self._end_narration(delta.name)
        if self._shows_submit and delta.index == 0 and self._executor.is_submit(delta.name):
            await self._writer.write_submit(delta.arguments, self._executor.current_sandbox)
        if self._client_calls is not None:
            await self._client_calls.on_delta(delta)

    @property
    def has_begun_client_call(self) -> bool:
        """True once a part of a client's tool call was emitted."""
        return self._client_calls is not None and self._client_calls.has_begun

    async def _end_narration(self, tool_name: str, *, is_call_text: bool = False) -> None:
        """Treat the prose before a call of the tool `tool_name` as narration. `is_call_text` is
        True if the held prose is the call itself."""
        if self._has_ended_narration:
            return
        self._has_ended_narration = True
        was_shown, rest = self.prose.is_shown, self.prose.take_remaining_deltas()
        if was_shown and not is_call_text:
            for piece in rest:
                await self._writer.write(piece.text, self._executor.current_sandbox, piece.logprobs)
        if self._executor.is_submit(tool_name):
            await self._writer.begin_answer()
        else:
            await self._writer.mark_text_as_narration()  # applies to text of an earlier turn too
        if not was_shown:
            await self._narrate("".join(piece.text for piece in rest))

    async def _narrate(self, text: str) -> None:
        if text:
            await self._emit(Narration(text))

    async def end_with_calls(self, turn: Turn, reply: Completion) -> Mapping[str, str]:
        """End a turn that has tool calls, and send the rest of its prose as narration. Return a
        mapping from the id of each emitted call in the turn to the id that the client received."""
        if self._streams:
            await self._end_narration(turn.calls[0].name, is_call_text=turn.calls_are_text)
            await self._narrate("".join(self._text_after_call))
        else:
            await emit_reasoning(reply, self._emit)
            await self._narrate("" if self.prose.is_echo_at_end() else text_of(reply.message))
        return await self._client_calls.end(turn) if self._client_calls else {}

    async def end_without_calls(self, reply: Completion, *, is_answer: bool) -> None:
        """End a turn without tool calls. The caller writes the rest of an answer; other prose is
        shown here, for it may still become the answer."""
        if not self._streams:
            await emit_reasoning(reply, self._emit)
        elif not is_answer and self._visibility != "never":
            for piece in self.prose.take_remaining_deltas():
                await self._writer.write(piece.text, self._executor.current_sandbox, piece.logprobs)


async def emit_reasoning(reply: Completion, emit: Emit) -> None:
    """Emit the reasoning of a reply that was not streamed."""
    for thought in reasoning_texts(reply.message):
        await emit(ReasoningDelta(thought))


class ClientCallStream:
    """Emits the client tool calls of one turn, piece by piece.

    A sent call cannot be withdrawn, so a call is started only if the client is certain to receive
    all of it: not after a call of `submit`, which may end the run. Calls are sent one at a time; a
    call whose deltas interleave with those of another is sent at the end of the run.
    """

    def __init__(
        self,
        emit: Emit,
        executor: ToolExecutor,
        client_tool_names: Collection[str],
        text_tools: Collection[str],
        new_ids: Iterator[str],
    ) -> None:
        """`client_tool_names` are the names of the client's tools. For a tool in `text_tools`, only
        the text in its arguments is sent. `new_ids` yields the ids under which the client receives
        calls."""
        self._emit = emit
        self._executor = executor
        self._client_tool_names = client_tool_names
        self._text_tools = text_tools
        self._new_ids = new_ids
        self._called_names: dict[int, str] = {}
        """Tool name of each call of the turn, by index in the turn."""
        self._started_ids: dict[int, str] = {}
        """Id of each started call, by index in the turn."""
        self._decided_indexes = set[int]()
        """Indexes of the calls that were started, or postponed to the end of the run."""
        self._open_index: int | None = None
        """Index of the call that is being sent."""
        self._arguments: defaultdict[int, list[str]] = defaultdict(list)
        """Arguments of each call so far, by index in the turn."""
        self._text_readers: dict[int, TextArgumentReader] = {}
        """Readers for the text of calls of `text_tools`, by index in the turn."""
        self._is_closed = False
        """True if no further call is started in this turn."""

    @property
    def has_begun(self) -> bool:
        """True once a call was started."""
        return bool(self._started_ids)

    async def on_delta(self, delta: ToolCallDelta) -> None:
        """Handle a piece of any call of the turn; emit it if its call can be streamed."""
        self._called_names[delta.index] = delta.name
        if self._executor.is_submit(delta.name):
            self._is_closed = True
        if not delta.arguments:
            return  # the name may be incomplete
        self._arguments[delta.index].append(delta.arguments)
        text = self._client_text(delta)
        if text and (delta.index == self._open_index or await self._start_call(delta)):
            await self._emit(ClientCallDelta(self._client_index(delta.index), text))

    async def end(self, turn: Turn) -> Mapping[str, str]:
        """End the turn. Return the id under which the client received each started call, by the
        call's id in the turn."""
        await self._finish_open_call()
        # Ignored calls are in neither `_called_names` nor `turn.calls`. So an index may differ from
        # the position in `turn.calls`, but the order is the same.
        return {
            call.id: self._started_ids[index]
            for index, call in zip(sorted(self._called_names), turn.calls, strict=False)
            if index in self._started_ids and call.name == self._called_names[index]
        }

    def _client_text(self, delta: ToolCallDelta) -> str:
        """Return the text of a piece that the client receives."""
        if delta.name not in self._text_tools:
            return delta.arguments
        text = self._text_readers.setdefault(delta.index, TextArgumentReader("input"))
        return text.feed(delta.arguments)

    async def _start_call(self, delta: ToolCallDelta) -> bool:
        """Start a call. Return False if the call was started before, or cannot be streamed."""
        index, name = delta.index, delta.name
        if self._is_closed or index in self._decided_indexes:
            return False
        self._decided_indexes.add(index)
        takes_text = name in self._text_tools
        is_object = takes_text or delta.arguments.lstrip().startswith("{")
        if not is_object or name not in self._client_tool_names:
            return False
        opened = self._open_index
        if opened is not None and (index < opened or not _is_json(self._arguments[opened])):
            self._is_closed = True
            return False
        await self._finish_open_call()
        self._open_index, self._started_ids[index] = index, next(self._new_ids)
        started = ClientCallStarted(
            self._client_index(index), self._started_ids[index], name, takes_text
        )
        await self._emit(started)
        return True

    async def _finish_open_call(self) -> None:
        if self._open_index is not None:
            await self._emit(ClientCallFinished(self._client_index(self._open_index)))
        self._open_index = None

    def _client_index(self, index: int) -> int:
        """Return the index of a call among the client's calls of the turn."""
        return sum(
            name in self._client_tool_names for at, name in self._called_names.items() if at < index
        )


def client_call_stream(
    task: AgentTask,
    emit: Emit,
    executor: ToolExecutor,
    client_tool_names: Collection[str],
    new_ids: Iterator[str],
) -> ClientCallStream | None:
    """Return the stream of one turn's client tool calls. Return None if the client has no tools, or
    if its calls are sent when the run ends, because the client uses the legacy `functions` or
    because secrets are redacted."""
    if (
        not client_tool_names
        or task.request.legacy_state is not None
        or SecretFinder(task.profile.redaction)
    ):
        return None
    return ClientCallStream(emit, executor, client_tool_names, task.request.text_tools, new_ids)


def _is_json(pieces: Collection[str]) -> bool:
    try:
        json.loads("".join(pieces))
    except (ValueError, RecursionError):
        return False
    return True


def prose_visibility(task: AgentTask) -> ProseVisibility:
    """Return when the prose of a turn may be sent as the answer."""
    needs_call = task.params.final.keys() - _STREAMABLE_PARAMS
    is_hidden = task.delivery.narration == "reasoning" or needs_call
    return "never" if is_hidden or not task.request.stream else "soon"


def prose_rules(
    task: AgentTask,
    messages: Sequence[Message],
    system_prompt: str,
    tools: Sequence[Mapping[str, Any]],
) -> ProseRules:
    """Return the rules for the visible prose of a run with this system prompt and these tools."""
    limits = [n for n in task.params.token_limits.values() if isinstance(n, int) and n > 0]
    descriptions = tuple(str(tool["function"].get("description", "")) for tool in tools)
    return ProseRules(
        max_tokens=min(limits, default=None),
        stop_strings=stop_strings(task),
        proxy_texts=build_proxy_texts((system_prompt, *descriptions), INSTRUCTIONS),
        client_texts=[text_of(message) for message in messages],
        tool_names=[tool_name(tool) for tool in (*tools, *task.request.client_tools)],
    )


def stop_strings(task: AgentTask) -> tuple[str, ...]:
    """Return the client's stop strings."""
    stop = task.params.final.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(each for each in stops if isinstance(each, str) and each)
