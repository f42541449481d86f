"""A clock that a test moves by hand."""

import asyncio


class HandClock:
    """It stands still between two calls of `advance`."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        """How long somebody has wanted to sleep, each time."""
        self._now = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        sleeper = (self._now + seconds, asyncio.Event())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1].wait()
        finally:
            self._sleepers.remove(sleeper)

    @property
    def alarms(self) -> list[float]:
        """When somebody wakes next, and so on, in seconds from now."""
        return sorted(due - self._now for due, _ in self._sleepers)

    def advance(self, seconds: float) -> None:
        """Let so much time pass; who is due wakes at the loop's next turn."""
        self._now += seconds
        for due, alarm in self._sleepers:
            if due <= self._now:
                alarm.set()
