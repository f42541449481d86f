"""A listing as the guest agent sends it: a line of JSON for each entry, read while it arrives."""

import asyncio
import json
import re

from sandbox_runtime.protocol import ProtocolError
from sandbox_runtime.reports import MAX_NUMBER
from sandbox_runtime.sandbox import Entry

MAX_LISTING_BYTES = 4 << 20
"""The agent lists no more, hashes aside. As text it may take four times as much memory: one wide
character makes all of a path's wide."""
HASH_BYTES = 68
"""What a hash adds to an entry."""
TURN_ENTRIES = 200
"""How many are parsed before other tasks have their turn: about 2 ms."""
MAX_PATH_BYTES = 4096
"""Of Linux: the agent leaves out what lies deeper."""
MAX_LINE_BYTES = 6 * MAX_PATH_BYTES + 1024
"""A path whose every byte is escaped, and the other fields."""
SHA256 = re.compile("[0-9a-f]{64}|")


class ListingReader:
    """The entries of one listing: their number and bytes are checked before they are parsed."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._bytes_left = MAX_LISTING_BYTES + HASH_BYTES * max_entries
        self._line = b""
        """The last line, of which the end has not arrived."""
        self._entries: list[Entry] = []

    async def feed(self, data: bytes) -> None:
        """Parse the lines that `data` completes, some in each turn of the loop. Raises
        ProtocolError."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ProtocolError("it sent an endless listing")
        if len(self._entries) + data.count(b"\n") > self._max_entries:
            raise self._too_many()
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise ProtocolError("it sent a malformed listing: a line has no end")
        for start in range(0, len(lines), TURN_ENTRIES):
            self._entries += map(_entry, lines[start : start + TURN_ENTRIES])
            await asyncio.sleep(0)

    def finish(self) -> tuple[Entry, ...]:
        """All entries, by path. Raises ProtocolError."""
        if self._line:
            self._entries.append(_entry(self._line))
        if len(self._entries) > self._max_entries:
            raise self._too_many()
        return tuple(sorted(self._entries, key=lambda entry: entry.path))

    def _too_many(self) -> ProtocolError:
        return ProtocolError(
            f"it sent a malformed listing: more than the {self._max_entries} entries asked for"
        )


def _entry(line: bytes) -> Entry:
    """One line of a listing. Raises ProtocolError."""
    if len(line) <= MAX_LINE_BYTES:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        match value:
            case [str(path), "file" | "directory" | "other" as kind, size, *rest] if (
                type(size) is int and 0 <= size < MAX_NUMBER and _is_path(path)
            ):
                match rest:
                    case []:
                        return Entry(path, kind, size)
                    case [str(digest)] if kind == "file" and SHA256.fullmatch(digest):
                        return Entry(path, kind, size, digest)
    raise ProtocolError(f"it sent a malformed listing: {line[:80]!r}")


def _is_path(path: str) -> bool:
    """Whether a path is relative, climbs nowhere, and is one that a file can have."""
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False
    parts = path.split("/")
    return size <= MAX_PATH_BYTES and "\0" not in path and not {"", ".", ".."} & set(parts)
