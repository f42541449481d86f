"""The frame log: the numbered frames of a streamed answer, for clients that subscribe late or
resume a stream."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

MAX_CHARS = 8_000_000
"""Maximum number of characters in a log. Beyond it, the oldest frames are dropped."""


class FrameLog:
    """The frames of one stream, numbered from 0."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self.first = 0
        """The number of the oldest frame in the log."""
        self.chars = 0
        self._max_chars = max_chars
        self._frames = deque[str]()
        self._is_complete = False
        self._changed = asyncio.Event()

    def add(self, frames: Iterable[str]) -> None:
        """Append frames."""
        for frame in frames:
            self._frames.append(frame)
            self.chars += len(frame)
        while self.chars > self._max_chars and len(self._frames) > 1:
            self.chars -= len(self._frames.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        """Mark the stream as complete."""
        self._is_complete = True
        self._wake()

    def to_json(self, last: Sequence[str] = ()) -> str:
        """Return the JSON that `from_json` reads: the frames of the log, then those of `last`."""
        return json.dumps({"first": self.first, "frames": [*self._frames, *last]})

    @classmethod
    def from_json(cls, text: str) -> "FrameLog":
        """Return a complete log."""
        value = json.loads(text)
        log = cls()
        log.first = value["first"]
        log.add(value["frames"])
        log.end()
        return log

    async def since(self, number: int) -> Sequence[str]:
        """Wait for frames from `number` on and return them. Frames that were dropped are left out.
        Return an empty list if the stream is complete and has no further frames."""
        while number >= self.first + len(self._frames) and not self._is_complete:
            await self._changed.wait()
        # Slice from the end: a reader that keeps up takes one frame of many thousands.
        new = islice(reversed(self._frames), max(0, self.first + len(self._frames) - number))
        return list(new)[::-1]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
