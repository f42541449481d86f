"""`StatusHold` tells how long the status line of a streamed response is held back, so that a failed
first model call can still decide the status. `FirstCallProgress` prevents retries that would come
too late for that."""

import time

from proxy.agent.events import CallProgress, Emit, ModelCallAccepted
from proxy.agent.model import StopRetryingError

_LAST_ATTEMPT_S = 2.0
"""Minimum time left for an attempt while the status line is held back, in seconds."""


class StatusHold:
    """Tells how long the status line of a streamed response is held back: at most `hold_s` seconds,
    in which a failed first model call can still decide the status."""

    def __init__(self, hold_s: float) -> None:
        self.held_until = time.monotonic() + hold_s
        self.is_held = True
        """False once the status line was sent. Attempts have no deadline from then on."""

    def has_time_for_attempt(self, delay_s: float) -> bool:
        """Return True if an attempt may begin in `delay_s` seconds: the status was sent already, or
        the attempt has time to decide it."""
        return not self.is_held or time.monotonic() + delay_s + _LAST_ATTEMPT_S <= self.held_until


class FirstCallProgress:
    """Emits the progress of a run's first model call until the backend accepts the call.

    While the HTTP status of a streamed response is held back, a retry that would come too late to
    decide the status is prevented.
    """

    def __init__(self, status_hold: StatusHold | None, emit: Emit) -> None:
        self._status_hold = status_hold
        self._emit = emit
        self._is_accepted = False

    async def on_progress(self, progress: CallProgress) -> None:
        """Emit the progress of the first call; ignore later calls. Raises StopRetryingError if the
        status is still held back, and the next attempt would come too late to decide it."""
        if self._is_accepted:
            return
        await self._emit(progress)
        if isinstance(progress, ModelCallAccepted):
            self._is_accepted = True
        elif self._status_hold and not self._status_hold.has_time_for_attempt(progress.retry_in_s):
            raise StopRetryingError
