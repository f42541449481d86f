"""A memory budget for the bodies of all requests, so that many large bodies cannot exhaust the
machine's memory."""

import asyncio
import gc
import sys
from collections.abc import Iterable
from typing import Any

from proxy.available_memory import AvailableMemory
from proxy.errors import BodyTooLargeError, BusyError, KeyBusyError

DEFAULT_BODY_MEMORY_MIB = 3072
COLLECTED_BYTES = 256 << 20
"""Number of released bytes after which garbage is collected before more bytes are reserved. The
objects of an ended run refer to each other, so that only a collection frees their memory."""
COPIES_PER_BODY = 3
"""Number of copies of an ASCII body in memory: received, decoded, and encoded for the backend."""


class BodyMemory:
    """Counts the bytes reserved for the bodies of requests, and limits them in total and per
    owner."""

    def __init__(
        self,
        max_bytes: int = DEFAULT_BODY_MEMORY_MIB << 20,
        max_bytes_per_owner: int | None = None,
        available: AvailableMemory | None = None,
    ) -> None:
        """`max_bytes_per_owner` is the maximum for the requests of one owner, by default
        `max_bytes`. `available`, if it is given, refuses bytes when little memory is available."""
        self._max_bytes = max_bytes
        self._available = available
        self.max_bytes_per_owner = max_bytes if max_bytes_per_owner is None else max_bytes_per_owner
        self._bytes_by_owner: dict[str, int] = {}
        self.held_bytes = 0
        """The reserved bytes of all owners."""
        self._uncollected_bytes = 0
        self.decoding = asyncio.Lock()
        """A lock, held while a large body is decoded, which blocks the event loop. Without the
        lock, bodies that arrive at the same time would be decoded without a pause between them."""

    def take(self, owner: str, count: int) -> None:
        """Reserve bytes. Raises BusyError if too few bytes are left or too little memory is
        available, and KeyBusyError if too few bytes of the owner's share are left."""
        if self._uncollected_bytes >= COLLECTED_BYTES:
            self._uncollected_bytes = 0
            gc.collect()
        owner_bytes = self._bytes_by_owner.get(owner, 0) + count
        if self.held_bytes + count > self._max_bytes:
            raise BusyError("Too many large requests are being answered. Send it again later.")
        if owner_bytes > self.max_bytes_per_owner:
            raise KeyBusyError(
                "Too many of your large requests are being answered. Send it again later."
            )
        if self._available:
            self._available.require(count)
        self.held_bytes += count
        self._bytes_by_owner[owner] = owner_bytes

    def release(self, owner: str, count: int) -> None:
        """Release reserved bytes."""
        self.held_bytes -= count
        self._uncollected_bytes += count
        self._bytes_by_owner[owner] -= count
        if not self._bytes_by_owner[owner]:
            del self._bytes_by_owner[owner]


class BodyReservation:
    """The memory reservation of one request. The bytes are released once the response is sent and
    the run has ended."""

    def __init__(self, memory: BodyMemory, owner: str) -> None:
        self._memory = memory
        self._owner = owner
        self._retain_count = 1
        self._bytes = 0

    def take(self, count: int) -> None:
        """Reserve more bytes. Raises BusyError if too few bytes are left now, and
        BodyTooLargeError if the request alone exceeds an owner's share."""
        if self._bytes + count > self._memory.max_bytes_per_owner:
            raise BodyTooLargeError(
                f"{self._memory.max_bytes_per_owner >> 20} MiB, counting its copies in memory"
            )
        self._memory.take(self._owner, count)
        self._bytes += count

    def retain(self) -> None:
        """Add a hold on the bytes. Each hold needs a call of `release`."""
        self._retain_count += 1

    def release(self) -> None:
        """Drop one hold on the bytes. Dropping the last hold releases the bytes. A new reservation
        has one hold, and each `retain` adds one."""
        self._retain_count -= 1
        if not self._retain_count and self._bytes:
            self._memory.release(self._owner, self._bytes)
            self._bytes = 0


def size_of_copies(raw_body: bytes, value: Any) -> int:
    """Return the size of the copies that are made of a body, in bytes: the decoded `value`, and the
    encoded body for the backend."""
    if raw_body.isascii() and b"\\" not in raw_body:
        return 2 * len(raw_body)
    return len(raw_body) + _size_of_strings(value)


def _size_of_strings(value: Any) -> int:
    """Return the bytes of all strings in a value: up to four for each character."""
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
