"""Every frame of a run's answer as it was numbered, for readers that come later or come back."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

MAX_CHARS = 8_000_000
"""How much is kept; beyond that the oldest go."""


class FrameLog:
    """The frames so far, counted from 0."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self.first = 0
        """The oldest that is kept."""
        self.chars = 0
        self._max_chars = max_chars
        self._frames = deque[str]()
        self._is_over = False
        self._news = asyncio.Event()

    def add(self, frames: Iterable[str]) -> None:
        """What comes next."""
        for frame in frames:
            self._frames.append(frame)
            self.chars += len(frame)
        while self.chars > self._max_chars and len(self._frames) > 1:
            self.chars -= len(self._frames.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        """Nothing comes any more."""
        self._is_over = True
        self._wake()

    def to_json(self, last: Sequence[str] = ()) -> str:
        """What `from_json` reads, with the frames that are still to come."""
        return json.dumps({"first": self.first, "frames": [*self._frames, *last]})

    @classmethod
    def from_json(cls, text: str) -> "FrameLog":
        """One that is over."""
        value = json.loads(text)
        recording = cls()
        recording.first = value["first"]
        recording.add(value["frames"])
        recording.end()
        return recording

    async def since(self, number: int) -> Sequence[str]:
        """Those from that number on, as soon as there are any; nothing at the end."""
        while number >= self.first + len(self._frames) and not self._is_over:
            await self._news.wait()
        # From the end: a reader that keeps up takes one, of many thousands.
        new = islice(reversed(self._frames), max(0, self.first + len(self._frames) - number))
        return list(new)[::-1]

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
