"""The output of a fake command, in readings: the parts that the waits for it return."""

import codecs
import re

from sandbox_runtime.command_output import truncation_marker
from sandbox_runtime.sandbox import ExecResult, OutputCap, StreamName

_CUT_CHARACTER = re.compile(rb"^[\x80-\xbf]{1,3}")


class Captured:
    """One output stream of a reading: its head, its tail and its size."""

    def __init__(self, cap: OutputCap) -> None:
        self.bytes = 0
        self.kept = bytearray()
        """The output that is written to a file, up to the limit."""
        self._max_kept_bytes = cap.max_kept_bytes if cap.retention_directory else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._newlines = 0
        self._tail_bytes = cap.max_bytes // 2
        self._tail_lines = cap.max_lines // 2
        self._room = cap.max_bytes - self._tail_bytes
        self._room_lines = cap.max_lines - self._tail_lines
        self._head = b""
        self._tail = bytearray()

    def feed(self, data: bytes) -> str:
        """Add output; return the part that belongs to the head."""
        self.bytes += len(data)
        self._newlines += data.count(b"\n")
        self.kept += data[: self._max_kept_bytes - len(self.kept)]
        head = b"" if self._tail else self._to_head(data)
        self._head += head
        self._tail += data[len(head) :]
        if len(self._tail) > 4 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]
        return self._decoder.decode(head)

    def _to_head(self, data: bytes) -> bytes:
        lines = data[: self._room].split(b"\n")
        head = b"\n".join(lines[: self._room_lines])
        if len(lines) > self._room_lines:
            head += b"\n" if self._room_lines else b""
        self._room -= len(head)
        self._room_lines -= head.count(b"\n")
        return head

    @property
    def truncated(self) -> bool:
        return len(self._head) + len(self._shown_tail()) < self.bytes

    @property
    def lines(self) -> int:
        is_open = (bytes(self._tail) or self._head)[-1:] not in (b"", b"\n")
        return self._newlines + is_open

    def _shown_tail(self) -> bytes:
        tail = bytes(self._tail[-self._tail_bytes :])
        if len(self._head) + len(tail) < self.bytes:
            tail = _CUT_CHARACTER.sub(b"", tail)
        lines = tail.split(b"\n")
        last = [lines.pop()] if lines[-1] == b"" else []
        return b"\n".join(lines[-self._tail_lines :] + last)

    def text(self, path: str) -> str:
        tail = self._shown_tail()
        omitted = self.bytes - len(self._head) - len(tail)
        if omitted == 0:
            return (self._head + tail).decode(errors="replace")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(self._head)
        separator = "" if not head or head.endswith("\n") else "\n"
        lines = self._newlines - self._head.count(b"\n") - tail.count(b"\n")
        marker = truncation_marker(omitted, lines, path, len(self.kept), self.bytes)
        return f"{head}{separator}{marker}\n{tail.decode(errors='replace')}"


class FakeReading:
    """One reading, kept until the next is requested."""

    def __init__(self, cap: OutputCap) -> None:
        self.pieces: list[tuple[StreamName, str]] = []
        """The streamed pieces of output."""
        self.stdout = Captured(cap)
        self.stderr = Captured(cap)
        self.result: ExecResult | None = None
        """The result, once the reading has ended."""

    def take(self, name: StreamName, data: bytes) -> None:
        text = (self.stdout if name == "stdout" else self.stderr).feed(data)
        if text:
            self.pieces.append((name, text))
