"""The frames of a streamed answer: recorded as text, and numbered."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

MAX_LOG_CHARS = 8_000_000
"""Maximum number of characters in a log. Beyond it, the oldest frames are dropped."""


def frames_to_json(first_number: int, frames: Sequence[str]) -> str:
    """Return frames as JSON. `first_number` is the number of the first frame."""
    return json.dumps({"first": first_number, "frames": frames})


def frames_from_json(text: str) -> tuple[int, Sequence[str]]:
    """Return the number of the first frame, and the frames, from JSON of `frames_to_json`."""
    value = json.loads(text)
    return value["first"], value["frames"]


@runtime_checkable
class FrameRecorder(Protocol):
    """An observer of a run that may record the frames of its streamed answer."""

    frames: "FrameLog | None"


class FrameLog:
    """The frames of one streamed answer, numbered from 0, for clients that subscribe late or resume
    the stream."""

    def __init__(self, max_chars: int = MAX_LOG_CHARS) -> None:
        self.first_number = 0
        """The number of the oldest frame in the log."""
        self.chars = 0
        self._max_chars = max_chars
        self._frames = deque[str]()
        self._is_complete = False
        self._change_event = asyncio.Event()

    def add(self, frames: Iterable[str]) -> None:
        """Append frames."""
        for frame in frames:
            self._frames.append(frame)
            self.chars += len(frame)
        while self.chars > self._max_chars and len(self._frames) > 1:
            self.chars -= len(self._frames.popleft())
            self.first_number += 1
        self._wake()

    def end(self) -> None:
        """Mark the stream as complete."""
        self._is_complete = True
        self._wake()

    def to_json(self, last_frames: Sequence[str] = ()) -> str:
        """Return the JSON that `from_json` reads: the frames of the log, then those of
        `last_frames`."""
        return frames_to_json(self.first_number, [*self._frames, *last_frames])

    @classmethod
    def from_json(cls, text: str) -> "FrameLog":
        """Return the log of a complete stream from the JSON that `to_json` returned."""
        log = cls()
        log.first_number, frames = frames_from_json(text)
        log.add(frames)
        log.end()
        return log

    async def wait_for_frames(self, number: int) -> Sequence[str]:
        """Wait for frames from `number` on and return them. Frames that were dropped are left out.
        Return an empty list if the stream is complete and has no further frames."""
        while number >= self.first_number + len(self._frames) and not self._is_complete:
            await self._change_event.wait()
        # Slice from the end: a reader that keeps up takes one frame of many thousands.
        new = islice(reversed(self._frames), max(0, self.first_number + len(self._frames) - number))
        return list(new)[::-1]

    def _wake(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()
