"""A run's first model call: a streamed response waits with its status until the backend has given
the status of that call."""

import time

from proxy.agent.events import CallAccepted, CallProgress, Emit
from proxy.agent.model import NoMoreAttempts

LAST_ATTEMPT_S = 2.0
"""While the status line is held back, no attempt starts with less time than this left."""


class StatusHold:
    """The status line of one streamed response, which is held back for `hold_s` at most."""

    def __init__(self, hold_s: float) -> None:
        self.until = time.monotonic() + hold_s
        self.is_held = True
        """False once the status line was sent: attempts are then bounded no more."""

    def has_time_for_attempt(self, in_s: float) -> bool:
        """Return whether an attempt that is made in so many seconds may still give the status."""
        return not self.is_held or time.monotonic() + in_s + LAST_ATTEMPT_S <= self.until


class FirstCall:
    """Emits how the run's first model call fares, and ends its attempts when the time for them is
    up."""

    def __init__(self, hold: StatusHold | None, emit: Emit) -> None:
        self._hold = hold
        self._emit = emit
        self._is_accepted = False

    async def hear(self, progress: CallProgress) -> None:
        """Pass on the progress of a call, if the call is the first. Raises NoMoreAttempts."""
        if self._is_accepted:
            return
        await self._emit(progress)
        if isinstance(progress, CallAccepted):
            self._is_accepted = True
        elif self._hold and not self._hold.has_time_for_attempt(progress.retry_in_s):
            raise NoMoreAttempts
