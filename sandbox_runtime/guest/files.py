"""Files of the sandbox: written whole or not at all, read and listed without following links."""

from __future__ import annotations

import itertools
import json
import os
import stat
import time

from sandbox_runtime.protocol import DATA, MAX_DATA_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sandbox_runtime.guest.agent import Agent


MAX_LISTING_BYTES = 4 << 20
HASH_BYTES = 1 << 20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Put:
    """A file being written."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._path = request["path"]
        self._bytes = 0
        if request.get("new") and os.path.lexists(self._path):
            raise FileExistsError(f"{self._path} exists")
        if os.path.isdir(self._path):
            raise IsADirectoryError(f"{self._path} is a directory")
        parent = os.path.dirname(self._path) or "."
        try:
            os.makedirs(parent, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(f"{parent} is no directory") from error
        self._part = f"{parent}/.put-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self._part, flags, 0o644)

    def feed(self, data: bytes) -> None:
        """More of the file."""
        self._agent.credit(self._stream, len(data))
        while data:
            written = os.write(self._fd, data)
            self._bytes += written
            data = data[written:]

    def finish_input(self) -> None:
        """Put the whole file in its place."""
        if os.path.isfile(self._path):
            os.fchmod(self._fd, stat.S_IMODE(os.stat(self._path).st_mode))
        os.rename(self._part, self._path)
        os.close(self._fd)
        self._agent.finish(self._stream, {"bytes": self._bytes})

    def pump(self, credit: int) -> None:
        """Nothing is sent back but the outcome."""

    def reset(self) -> None:
        """Leave no trace."""
        os.close(self._fd)
        try:
            os.unlink(self._part)
        except OSError:
            pass  # a command has removed it, or its directory


class Get:
    """A regular file being read."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._left = request["max_bytes"]
        self._sent = 0
        self._fd = os.open(request["path"], _READ_FLAGS)
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self._fd)
            raise IsADirectoryError(f"{request['path']} is not a regular file")
        if facts.st_size > self._left:
            os.close(self._fd)
            raise OverflowError(f"{request['path']} has {facts.st_size} bytes")
        agent.pump(stream)

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece of the file."""
        data = os.read(self._fd, min(credit, MAX_DATA_BYTES))
        self._left -= len(data)
        if self._left < 0:
            self.reset()
            self._agent.fail(self._stream, "too_large", "the file grew while it was read")
            return None
        if data:
            self._sent += len(data)
            return DATA, data
        self.reset()
        self._agent.finish(self._stream, {"bytes": self._sent})
        return None

    def feed(self, data: bytes) -> None:
        """A reader takes no input."""

    def finish_input(self) -> None:
        """A reader takes no input."""

    def reset(self) -> None:
        """Stop reading."""
        os.close(self._fd)


class Walk:
    """A directory being listed: one JSON array `[path, kind, bytes]` a line. Where hashes are asked
    for, a file's line ends with one if the file has at most `hash_bytes` and its turn comes within
    `hash_s`."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._root = request["path"]
        if not stat.S_ISDIR(os.lstat(self._root).st_mode):
            raise NotADirectoryError(f"{self._root} is not a directory")
        self._hash_bytes = -1 if request["hash_bytes"] is None else request["hash_bytes"]
        self._hash_end_s = time.monotonic() + (request["hash_s"] or 0)
        self._hashing: Hashing | None = None
        self._found: list[tuple[str, str, int]] = []
        self._truncated = False
        room = MAX_LISTING_BYTES
        for entry in _below(self._root, request["max_depth"], request["max_entries"]):
            room -= len(json.dumps(entry)) + 1
            if len(self._found) == request["max_entries"] or room < 0:
                self._truncated = True
                break
            self._found.append(entry)
        self._found.reverse()
        self._text = b""
        agent.pump(stream)

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece of the listing; while a file is being hashed, none."""
        while len(self._text) < credit and self._found:
            line = self._line(self._found[-1])
            if line is None:
                self._agent.after(0, self._go_on)
                break
            self._found.pop()
            self._text += line
        piece = self._text[: min(credit, MAX_DATA_BYTES)]
        self._text = self._text[len(piece) :]
        if piece:
            return DATA, piece
        if not self._found:
            self._agent.finish(self._stream, {"truncated": self._truncated})
        return None

    def _go_on(self) -> None:
        self._agent.pump(self._stream)

    def _line(self, entry: tuple[str, str, int]) -> bytes | None:
        is_late = time.monotonic() >= self._hash_end_s
        if is_late or entry[1] != "file" or entry[2] > self._hash_bytes:
            self.reset()
            return json.dumps(entry).encode() + b"\n"
        self._hashing = self._hashing or Hashing(os.path.join(self._root, entry[0]), entry[2])
        digest = self._hashing.advance()
        if digest is None:
            return None
        self._hashing = None
        return json.dumps([*entry, digest]).encode() + b"\n"

    def feed(self, data: bytes) -> None:
        """A listing takes no input."""

    def finish_input(self) -> None:
        """A listing takes no input."""

    def reset(self) -> None:
        """Stop."""
        if self._hashing:
            self._hashing.close()
            self._hashing = None


class Hashing:
    """A file's SHA-256, a slice at a time, so that the agent serves others in between. No more than
    `size` bytes are read: a file that grows for ever has an end there."""

    def __init__(self, path: str, size: int) -> None:
        import hashlib  # noqa: PLC0415 - slow to import, and rarely needed

        self._digest = hashlib.sha256()
        self._left = size
        try:
            self._fd = os.open(path, _READ_FLAGS)
        except OSError:
            self._fd = -1

    def advance(self) -> str | None:
        """The digest in hex once all is read, "" of what cannot be; None before that."""
        if self._fd < 0:
            return ""
        try:
            is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
            data = os.read(self._fd, min(HASH_BYTES, self._left)) if is_file else None
        except OSError:
            data = None
        if data:
            self._digest.update(data)
            self._left -= len(data)
            return None
        self.close()
        return "" if data is None else self._digest.hexdigest()

    def close(self) -> None:
        """Give the file back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _below(root: str, max_depth: int | None, max_entries: int) -> Iterator[tuple[str, str, int]]:
    """Everything below a directory; of one directory no more than `max_entries` and one."""
    waiting = [("", 1)]
    while waiting:
        prefix, depth = waiting.pop()
        try:
            with os.scandir(os.path.join(root, prefix)) as found:
                entries = list(itertools.islice(found, max_entries + 1))
        except OSError:
            continue  # gone or unreadable since its parent was read
        for entry in entries:
            path = prefix + entry.name
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(facts.st_mode):
                yield path, "directory", 0
                if max_depth is None or depth < max_depth:
                    waiting.append((path + "/", depth + 1))
            else:
                yield path, "file" if stat.S_ISREG(facts.st_mode) else "other", facts.st_size
