"""A file inside that has an output stream whole, where more was written than is shown."""

from __future__ import annotations

import os


class Room:
    """How much a command may still keep, in all its readings."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes


class Spool:
    """One stream's: begun when the head is over, given up where it cannot be written."""

    def __init__(self, path: str, room: Room) -> None:
        self._path = path
        self._room = room
        self._fd = -1
        self._is_full = room.left <= 0
        self.bytes = 0

    def begin(self, head: bytes) -> None:
        """Make the file; `head` is what was written so far."""
        if self._is_full:
            return
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
        except (OSError, ValueError):
            return
        self.add(head)

    def add(self, data: bytes) -> None:
        """Write on while there is room; once there was none, there is no more of it."""
        if self._is_full:
            return
        self._is_full = len(data) > self._room.left
        data = data[: self._room.left]
        while data and self._fd >= 0:
            try:
                written = os.write(self._fd, data)
            except OSError:
                self._remove()
                return
            self.bytes += written
            self._room.left -= written
            data = data[written:]

    def end(self, is_needed: bool) -> int:
        """Close it; returns how much it has, 0 where there is none."""
        if self._fd >= 0 and is_needed:
            os.close(self._fd)
            self._fd = -1
        elif self._fd >= 0:
            self._remove()
        return self.bytes

    def _remove(self) -> None:
        os.close(self._fd)
        self._room.left += self.bytes
        self._fd, self.bytes = -1, 0
        try:
            os.unlink(self._path)
        except OSError:
            pass
