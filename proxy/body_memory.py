"""One memory for the bodies of all requests, so that many large ones cannot fill the machine's."""

from proxy.errors import BusyError

DEFAULT_MIB = 1024


class BodyMemory:
    """Counts the bytes of the bodies that requests and their runs hold."""

    def __init__(self, max_bytes: int = DEFAULT_MIB << 20) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        """All that is counted at present."""

    def take(self, count: int) -> None:
        """Count more bytes. Raises BusyError where other requests' bodies leave no room."""
        if self.held_bytes + count > self._max_bytes:
            raise BusyError("Too many large requests are being answered. Send it again later.")
        self.held_bytes += count

    def give(self, count: int) -> None:
        """Count bytes as held no more."""
        self.held_bytes -= count


class HeldBody:
    """What one request holds of the memory: until its answer is sent and its run has ended."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._holders = 1
        self._bytes = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises BusyError."""
        self._memory.take(count)
        self._bytes += count

    def keep(self) -> None:
        """Add a holder, which calls `release` in its turn."""
        self._holders += 1

    def release(self) -> None:
        """Take a holder away. With the last one the bytes are counted no more."""
        self._holders -= 1
        if not self._holders:
            self._memory.give(self._bytes)
            self._bytes = 0
