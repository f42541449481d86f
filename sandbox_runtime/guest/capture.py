"""What is shown of an output stream: its head and its tail, all of it counted."""

from __future__ import annotations

from collections import deque


class Capture:
    """One output stream: its first bytes sent on as they come, its last bytes kept, all counted."""

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        self._head_bytes = max_bytes - max_bytes // 2
        self._head_lines = max_lines - max_lines // 2
        self._tail_bytes = max_bytes // 2
        self._tail_lines = max_lines // 2
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._head_open = True
        self.total_bytes = 0
        self.total_lines = 0
        self.shown_bytes = 0
        self.shown_lines = 0

    def feed(self, data: bytes) -> bytes:
        """Take output in; returns the part of it that still belongs to the head."""
        self.total_bytes += len(data)
        self.total_lines += data.count(b"\n")
        head = self._take_head(data) if self._head_open else b""
        self.shown_bytes += len(head)
        rest = data[len(head) :]
        if rest:
            self._head_open = False
            self._ring.append(rest)
            self._ring_bytes += len(rest)
            while self._ring and self._ring_bytes - len(self._ring[0]) >= self._tail_bytes:
                self._ring_bytes -= len(self._ring.popleft())
        return head

    def _take_head(self, data: bytes) -> bytes:
        head = data[: self._head_bytes]
        if len(head) < len(data):
            head = _without_cut_character(head)
        lines = head.count(b"\n")
        if lines > self._head_lines:
            head = b"".join(line + b"\n" for line in head.split(b"\n")[: self._head_lines])
            lines = self._head_lines
        self._head_bytes -= len(head)
        self._head_lines -= lines
        self.shown_lines += lines
        return head

    def tail(self) -> bytes:
        """The end of the stream, as much as the cap allows."""
        kept = b"".join(self._ring)
        tail = kept[max(0, len(kept) - self._tail_bytes) :]
        if self.shown_bytes + len(tail) < self.total_bytes:
            tail = _from_whole_character(tail)
        lines = tail.split(b"\n")  # a last line without a newline counts as one
        excess = len(lines) - (1 if lines[-1] == b"" else 0) - self._tail_lines
        if excess > 0:
            tail = b"\n".join(lines[excess:])
        self.shown_bytes += len(tail)
        self.shown_lines += tail.count(b"\n")
        return tail


def _without_cut_character(data: bytes) -> bytes:
    """`data` less a UTF-8 character at its end that is not whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            whole = back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
            return data if whole else data[:-back]
        if byte < 0x80:
            break
    return data


def _from_whole_character(data: bytes) -> bytes:
    """`data` from the first byte on that begins a UTF-8 character."""
    for start in range(min(4, len(data))):
        if data[start] & 0xC0 != 0x80:
            return data[start:]
    return data
