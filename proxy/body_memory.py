"""One memory for the bodies of all requests, so that many large ones cannot fill the machine's."""

from proxy.errors import BusyError

DEFAULT_MIB = 1024


class BodyMemory:
    """Counts the bytes of the bodies that requests hold."""

    def __init__(self, max_bytes: int = DEFAULT_MIB << 20) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises BusyError where other requests' bodies leave no room."""
        if self._held + count > self._max_bytes:
            raise BusyError("Too many large requests are being answered. Send it again later.")
        self._held += count

    def give(self, count: int) -> None:
        """Count bytes as held no more."""
        self._held -= count
