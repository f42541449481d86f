"""Rate limit for log lines and events that a sandboxed program can trigger."""


class Throttle:
    """Lets `most` through in each period and counts the others."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._ends_at = float("-inf")
        self._seen = 0

    def start_period(self, now: float) -> int:
        """Begin a new period if the last one is over. Return how many that one held back."""
        if now < self._ends_at:
            return 0
        held_back = self.take_held_back()
        self._ends_at, self._seen = now + self._period_s, 0
        return held_back

    def allows(self) -> bool:
        """Count one more. Return whether it may be told by itself."""
        self._seen += 1
        return self._seen <= self._most

    def take_held_back(self) -> int:
        """Return how many the period has held back so far, and count them no more."""
        held_back = max(0, self._seen - self._most)
        self._seen -= held_back
        return held_back
