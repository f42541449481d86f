"""One memory for the bodies of all requests, so that many large ones cannot fill the machine's."""

import sys
from collections.abc import Iterable
from typing import Any

from proxy.errors import BodyTooLargeError, BusyError

DEFAULT_MIB = 3072
COPIES = 3
"""The copies of an ASCII body in memory: as received, as decoded, and as sent to the backend."""


class BodyMemory:
    """Counts the bytes of the bodies that requests and their runs hold."""

    def __init__(self, max_bytes: int = DEFAULT_MIB << 20, share_bytes: int | None = None) -> None:
        """`share_bytes` is what one owner's may take; None: all."""
        self._max_bytes = max_bytes
        self.share_bytes = max_bytes if share_bytes is None else share_bytes
        self._of_owners: dict[str, int] = {}
        self.held_bytes = 0
        """All that is counted at present."""

    def take(self, owner: str, count: int) -> None:
        """Count more bytes. Raises BusyError where other requests' bodies leave no room, or the
        owner's other ones."""
        owners = self._of_owners.get(owner, 0) + count
        if owners > self.share_bytes:
            raise BusyError("Too many large requests of yours are being answered. Send it later.")
        if self.held_bytes + count > self._max_bytes:
            raise BusyError("Too many large requests are being answered. Send it again later.")
        self.held_bytes += count
        self._of_owners[owner] = owners

    def release(self, owner: str, count: int) -> None:
        """Count bytes as held no more."""
        self.held_bytes -= count
        self._of_owners[owner] -= count
        if not self._of_owners[owner]:
            del self._of_owners[owner]


class BodyReservation:
    """One request's share of the memory, kept until its answer is sent and its run has ended."""

    def __init__(self, memory: BodyMemory, owner: str) -> None:
        self._memory = memory
        self._owner = owner
        self._holders = 1
        self._bytes = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises BusyError, or BodyTooLargeError for more than may ever be
        counted for one owner."""
        if self._bytes + count > self._memory.share_bytes:
            raise BodyTooLargeError(
                f"{self._memory.share_bytes >> 20} MiB, as it is held in memory"
            )
        self._memory.take(self._owner, count)
        self._bytes += count

    def add_holder(self) -> None:
        """Add a holder, which calls `release` in its turn."""
        self._holders += 1

    def release(self) -> None:
        """Take a holder away. With the last one the bytes are counted no more."""
        self._holders -= 1
        if not self._holders and self._bytes:
            self._memory.release(self._owner, self._bytes)
            self._bytes = 0


def weight(written: bytes, value: Any) -> int:
    """Return the bytes of a body's other copies: `value`, as it was decoded, and the one that is
    sent to the backend."""
    if written.isascii() and b"\\" not in written:
        return 2 * len(written)
    return len(written) + _size(value)


def _size(value: Any) -> int:
    """Return how many bytes the strings of a value take: up to four for each character."""
    size = 0
    left: list[Iterable[Any]] = [[value]]
    while left:
        for each in left.pop():
            kind = type(each)
            if kind is str:
                size += sys.getsizeof(each)
            elif kind is list:
                left.append(each)
            elif kind is dict:
                left += (each, each.values())
    return size
