"""One memory for the bodies of all requests, so that many large ones cannot fill the machine's."""

from proxy.errors import BusyError

DEFAULT_MIB = 1024


class BodyMemory:
    """Counts the bytes of the bodies that requests and their runs hold."""

    def __init__(self, max_bytes: int = DEFAULT_MIB << 20, share_bytes: int | None = None) -> None:
        """`share_bytes` is what one owner's may take; None: all."""
        self._max_bytes = max_bytes
        self._share_bytes = max_bytes if share_bytes is None else share_bytes
        self._of_owners: dict[str, int] = {}
        self.held_bytes = 0
        """All that is counted at present."""

    def take(self, owner: str, count: int) -> None:
        """Count more bytes. Raises BusyError where other requests' bodies leave no room, or the
        owner's other ones."""
        owners = self._of_owners.get(owner, 0) + count
        if owners > self._share_bytes:
            raise BusyError("Too many large requests of yours are being answered. Send it later.")
        if self.held_bytes + count > self._max_bytes:
            raise BusyError("Too many large requests are being answered. Send it again later.")
        self.held_bytes += count
        self._of_owners[owner] = owners

    def give(self, owner: str, count: int) -> None:
        """Count bytes as held no more."""
        self.held_bytes -= count
        self._of_owners[owner] -= count
        if not self._of_owners[owner]:
            del self._of_owners[owner]


class HeldBody:
    """What one request holds of the memory: until its answer is sent and its run has ended."""

    def __init__(self, memory: BodyMemory, owner: str) -> None:
        self._memory = memory
        self._owner = owner
        self._holders = 1
        self._bytes = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises BusyError."""
        self._memory.take(self._owner, count)
        self._bytes += count

    def keep(self) -> None:
        """Add a holder, which calls `release` in its turn."""
        self._holders += 1

    def release(self) -> None:
        """Take a holder away. With the last one the bytes are counted no more."""
        self._holders -= 1
        if not self._holders and self._bytes:
            self._memory.give(self._owner, self._bytes)
            self._bytes = 0
