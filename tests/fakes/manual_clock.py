"""A Clock whose time a test sets."""

import asyncio


class ManualClock:
    """A clock whose time changes only by `advance`."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        """The duration of each call of `sleep`."""
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
        """The times until the sleepers wake, in seconds, the earliest first."""
        return sorted(due - self._now for due, _ in self._sleepers)

    def advance(self, seconds: float) -> None:
        """Advance the time; sleepers that are due wake at the loop's next turn."""
        self._now += seconds
        for due, alarm in self._sleepers:
            if due <= self._now:
                alarm.set()
