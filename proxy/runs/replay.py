"""What has happened in a run, for listeners that come later."""

from collections.abc import Iterator
from dataclasses import replace

from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    Event,
    OfChoice,
    ReasoningDelta,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)

MAX_CHARS = 1_000_000
"""How much is kept beside the answer, which is kept whole."""
MAX_LIVE_CHARS = 100_000
"""How much of a command's live output is kept, about."""
OVERHEAD_CHARS = 100
"""What an event counts for beside its text."""


class Replay:
    """The events so far: pieces of one text joined into one, of a command's live output the
    beginning, and the oldest turns forgotten, but for their number, beyond `max_chars`."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._events: list[Event] = []
        self._pieces: list[str] = []
        """The text of the last event, where that still grows."""
        self._growing: AnswerDelta | ReasoningDelta | ToolOutput | ClientCallDelta | None = None
        """The first piece of that."""
        self._others: dict[int, Replay] = {}
        """Of further choices."""
        self._live_chars = 0
        """Of the running command's output."""
        self._chars = 0
        self._full_at = max_chars

    def add(self, event: Event) -> None:
        """Take in what has just happened."""
        if isinstance(event, OfChoice):
            other = self._others.setdefault(event.index, Replay(self._max_chars))
            other.add(event.event)
            return
        if isinstance(event, ToolOutput):
            if self._live_chars > MAX_LIVE_CHARS:
                return
            self._live_chars += len(event.text)
        elif isinstance(event, ToolCallStarted):
            self._live_chars = 0
        self._append(event)
        self._chars += _chars(event)
        if self._chars > self._full_at:
            self._forget()

    def events(self) -> list[Event]:
        """What is kept of it, in order."""
        self._close()
        others = (
            OfChoice(index, event)
            for index, replay in self._others.items()
            for event in replay.events()
        )
        return [*self._events, *others]

    def _append(self, event: Event) -> None:
        match event:
            case AnswerDelta(_, None) | ReasoningDelta() | ToolOutput() | ClientCallDelta():
                if self._growing is None or not _are_one(self._growing, event):
                    self._close()
                    self._growing = event
                self._pieces.append(event.text)
            case _:
                self._close()
                self._events.append(event)

    def _close(self) -> None:
        if self._growing is not None:
            is_one = len(self._pieces) == 1
            whole = self._growing if is_one else replace(self._growing, text="".join(self._pieces))
            self._events.append(whole)
            self._growing = None
            self._pieces = []

    def _forget(self) -> None:
        """Keep the later half, from the beginning of a turn on, and all of the answer."""
        self._close()
        turns = list(self._turns())
        half = self._max_chars // 2
        latest = turns[-1][0] if turns else 0
        first = next((at for at, chars in turns if chars <= half), latest)
        forgotten = self._events[:first]
        answer = [event for event in forgotten if isinstance(event, AnswerDelta | AnswerRestarted)]
        steps = sum(map(_steps, forgotten))
        omitted = [StepsOmitted(steps)] if steps else []
        self._events = [*answer, *omitted, *self._events[first:]]
        self._chars = sum(map(_chars, self._events))
        # What is left may be one long turn: looked at anew only when it has doubled.
        self._full_at = max(self._max_chars, 2 * self._chars)

    def _turns(self) -> Iterator[tuple[int, int]]:
        """Where each turn begins, and how large the rest is from there."""
        left = self._chars
        for at, event in enumerate(self._events):
            if isinstance(event, TurnStarted):
                yield at, left
            left -= _chars(event)


def _are_one(first: Event, second: Event) -> bool:
    """Whether two pieces are of one text."""
    if isinstance(first, ToolOutput) and isinstance(second, ToolOutput):
        return (first.step, first.stream) == (second.step, second.stream)
    if isinstance(first, ClientCallDelta) and isinstance(second, ClientCallDelta):
        return first.index == second.index
    return type(first) is type(second)


def _steps(event: Event) -> int:
    """How many steps are no longer told of where an event is forgotten."""
    if isinstance(event, StepsOmitted):
        return event.steps
    return int(isinstance(event, ToolCallStarted))


def _chars(event: Event) -> int:
    match event:
        case (
            AnswerDelta(text)
            | ReasoningDelta(text)
            | ToolOutput(text=text)
            | ClientCallDelta(text=text)
            | ToolCallFinished(observation=text)
        ):
            return OVERHEAD_CHARS + len(text)
        case ToolCallStarted(arguments=arguments):
            given = (value for value in arguments.values() if isinstance(value, str))
            return OVERHEAD_CHARS + sum(map(len, given))
    return OVERHEAD_CHARS
