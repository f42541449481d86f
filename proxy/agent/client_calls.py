"""Calls of the client's own tools on their way to the client while the model writes them."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from policies.redaction import Secrets
from proxy.agent.events import (
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Emit,
    ToolCallDelta,
)
from proxy.agent.task import Task
from proxy.agent.text_argument import TextArgument
from proxy.agent.tool_calls import Turn
from proxy.agent.tools import Toolbox


class ClientCallStream:
    """Emits the calls of one turn, piece by piece.

    What was sent cannot be taken back, so a call is begun only where the client is certain to get
    it: not after a call of `submit`, which may end the run. Calls are sent one after the other; a
    call whose pieces come between those of another is left for the end of the run.
    """

    def __init__(
        self,
        emit: Emit,
        toolbox: Toolbox,
        names: Collection[str],
        free_text: Collection[str],
        new_id: "Iterator[str]",
    ) -> None:
        """`names` are those of the client's tools; of calls of `free_text` tools the one text in
        their arguments is sent; `new_id` makes the ids that the client is given."""
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
        """Take a piece of any call of the turn in, and pass it on if it may be."""
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
        """The turn is over. Return the ids that the client has, by the ids in the turn."""
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
        """The place of a call among the client's calls of the turn."""
        return sum(name in self._names for at, name in self._called.items() if at < place)


def client_call_stream(
    task: Task, emit: Emit, toolbox: Toolbox, names: Collection[str], new_id: "Iterator[str]"
) -> ClientCallStream | None:
    """Return the stream for one turn's calls; None where the client gets them when the run ends:
    it speaks of `functions`, or secrets are to be taken out of what it is sent."""
    if not names or task.legacy_state is not None or Secrets(task.profile.redact):
        return None
    return ClientCallStream(emit, toolbox, names, task.free_text, new_id)


def _is_json(pieces: Collection[str]) -> bool:
    try:
        json.loads("".join(pieces))
    except (ValueError, RecursionError):
        return False
    return True
