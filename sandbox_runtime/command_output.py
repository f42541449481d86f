"""What a command has printed, put together again on the host."""

import codecs
from collections.abc import Mapping

from sandbox_runtime.protocol import DATA, STDERR, STDERR_TAIL, TAIL
from sandbox_runtime.sandbox import OnOutput, OutputCap, StreamName

STREAM_NAMES: Mapping[int, StreamName] = {DATA: "stdout", STDERR: "stderr"}
KINDS: Mapping[StreamName, tuple[int, int]] = {
    "stdout": (DATA, TAIL),
    "stderr": (STDERR, STDERR_TAIL),
}


class CommandOutput:
    """What a command has printed so far."""

    def __init__(self, cap: OutputCap, on_output: OnOutput | None) -> None:
        # The agent cuts at characters and lines, never above; each stream has the cap to itself.
        self._room = 2 * cap.max_bytes
        self._on_output = on_output
        self._pieces: dict[int, list[bytes]] = {DATA: [], STDERR: [], TAIL: [], STDERR_TAIL: []}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {kind: decoder(errors="replace") for kind in STREAM_NAMES}
        self.truncated = False

    async def take(self, kind: int, data: bytes) -> bool:
        """Take a piece in and pass it on; returns whether there was room for it."""
        self._room -= len(data)
        if self._room < 0:
            return False
        self._pieces[kind].append(data)
        if self._on_output and kind in STREAM_NAMES:
            text = self._decoders[kind].decode(data)
            if text:
                await self._on_output(STREAM_NAMES[kind], text)
        return True

    def text(self, name: StreamName, numbers: Mapping[str, float], path: str) -> str:
        """A whole stream, or its head and tail with a line between that says what is left out, and
        the `path` that has it."""
        head_kind, tail_kind = KINDS[name]
        head, tail = b"".join(self._pieces[head_kind]), b"".join(self._pieces[tail_kind])
        total = int(numbers[f"{name}_bytes"])
        omitted = total - len(head) - len(tail)
        if omitted <= 0:
            return (head + tail).decode(errors="replace")
        self.truncated = True
        lines = int(numbers[f"{name}_omitted_lines"])
        marker = left_out(omitted, lines, path, int(numbers[f"{name}_kept_bytes"]), total)
        shown = head.decode(errors="replace")
        newline = "" if shown.endswith("\n") or not shown else "\n"
        return f"{shown}{newline}{marker}\n{tail.decode(errors='replace')}"

    def lines(self, numbers: Mapping[str, float]) -> int:
        """The number of lines of both streams, those left out included. A last line without a
        newline counts."""
        count = 0
        for name, (head_kind, tail_kind) in KINDS.items():
            head, tail = b"".join(self._pieces[head_kind]), b"".join(self._pieces[tail_kind])
            shown = head.count(b"\n") + tail.count(b"\n")
            is_open = (tail or head)[-1:] not in (b"", b"\n")
            count += shown + is_open + max(0, int(numbers[f"{name}_omitted_lines"]))
        return count


def left_out(omitted: int, lines: int, path: str, kept: int, total: int) -> str:
    """The line in the place of what is not shown of a stream."""
    where = ""
    if path and kept < total:
        where = f"; the first {kept} bytes of it all are in {path}"
    elif path:
        where = f"; all of it is in {path}"
    return f"[... {omitted} bytes, {lines} lines left out{where} ...]"
