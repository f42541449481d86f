"""What a command has printed, put together again on the host."""

import codecs
from collections.abc import Mapping

from sandbox_runtime.protocol import DATA, STDERR, STDERR_TAIL, TAIL
from sandbox_runtime.reports import OutputReport
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
        # Not a list of pieces: each of them would cost far more memory than its one byte.
        self._text = {kind: bytearray() for kind in (DATA, STDERR, TAIL, STDERR_TAIL)}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {kind: decoder(errors="replace") for kind in STREAM_NAMES}
        self.truncated = False

    async def take(self, kind: int, data: bytes) -> bool:
        """Take a piece in and pass it on; returns whether there was room for it."""
        self._room -= len(data)
        if self._room < 0:
            return False
        self._text[kind] += data
        if self._on_output and kind in STREAM_NAMES:
            text = self._decoders[kind].decode(data)
            if text:
                await self._on_output(STREAM_NAMES[kind], text)
        return True

    def text(self, name: StreamName, report: OutputReport, path: str) -> str:
        """A whole stream, or its head and tail with a line between that says what is left out, and
        the `path` that has it."""
        head, tail = (self._text[kind] for kind in KINDS[name])
        omitted = report.total_bytes - len(head) - len(tail)
        if omitted <= 0:
            return (head + tail).decode(errors="replace")
        self.truncated = True
        marker = left_out(
            omitted, report.omitted_lines, path, report.kept_bytes, report.total_bytes
        )
        shown = head.decode(errors="replace")
        newline = "" if shown.endswith("\n") or not shown else "\n"
        return f"{shown}{newline}{marker}\n{tail.decode(errors='replace')}"

    def lines(self, reports: Mapping[StreamName, OutputReport]) -> int:
        """The number of lines of both streams, those left out included. A last line without a
        newline counts."""
        count = 0
        for name, kinds in KINDS.items():
            head, tail = (self._text[kind] for kind in kinds)
            shown = head.count(b"\n") + tail.count(b"\n")
            last = (tail or head)[-1:]
            is_open = bool(last) and last != b"\n"
            count += shown + is_open + reports[name].omitted_lines
        return count


def left_out(omitted: int, lines: int, path: str, kept: int, total: int) -> str:
    """The line in the place of what is not shown of a stream."""
    where = ""
    if path and kept < total:
        where = f"; the first {kept} bytes of it all are in {path}"
    elif path:
        where = f"; all of it is in {path}"
    return f"[... {omitted} bytes, {lines} lines left out{where} ...]"
