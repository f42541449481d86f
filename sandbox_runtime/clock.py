"""Time, as far as something waits for it to pass."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A time that never goes back."""

    def time(self) -> float:
        """Now, in seconds since some moment."""

    async def sleep(self, seconds: float) -> None:
        """Return so much later."""


class SystemClock:
    """The machine's own."""

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
