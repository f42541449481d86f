"""The clock that timers of the sandbox runtime use; tests replace it with a manual one."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def time(self) -> float:
        """Return the current time in seconds; only differences have a meaning."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class SystemClock:
    """The monotonic clock of this machine."""

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
