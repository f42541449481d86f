"""The output of commands: `CommandOutput` collects on the host what a command prints,
`OutputRetention` accounts for the files in the sandbox that keep the full output, and `exec_result`
combines both with the agent's report."""

import codecs
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.workspace import OBSERVATION_DIR
from sandbox_runtime.backends.base import LimitEvents
from sandbox_runtime.protocol import DATA, STDERR, STDERR_TAIL, TAIL
from sandbox_runtime.reports import CommandReport, OutputReport
from sandbox_runtime.sandbox import ExecResult, OnOutput, OutputCap, StreamName

STREAM_NAMES: Mapping[int, StreamName] = {DATA: "stdout", STDERR: "stderr"}
KINDS: Mapping[StreamName, tuple[int, int]] = {
    "stdout": (DATA, TAIL),
    "stderr": (STDERR, STDERR_TAIL),
}
MAX_KEPT_BYTES = 32 << 20
"""Maximum total size of the output files of one sandbox, whose disk may be in memory."""
PRUNE = f"""export LC_ALL=C
find {OBSERVATION_DIR} -type f ! -path '*
*' -printf '%T@ %s %p\\n' 2>/dev/null | sort -rn | {{
kept=0
while read -r _ size path; do
    if [ $((kept + size)) -le {MAX_KEPT_BYTES // 2} ]; then
        kept=$((kept + size))
    else
        rm -f -- "$path"
    fi
done
echo "$kept"
}}"""
"""A shell script that keeps output files of a restored workspace, newest first, up to half of
MAX_KEPT_BYTES, removes the rest and prints the total size of the kept files. A workspace passes
through many sandboxes, and each needs room for new files."""


class CommandOutput:
    """The output of a command during one reading, as defined in `sandbox_runtime.protocol`."""

    def __init__(self, cap: OutputCap, on_output: OnOutput | None) -> None:
        # The agent truncates each stream at a character or line boundary within the cap.
        self._bytes_left = 2 * cap.max_bytes
        self._on_output = on_output
        # Not lists of pieces: a piece of one byte would take far more memory than a byte.
        self._text = {kind: bytearray() for kind in (DATA, STDERR, TAIL, STDERR_TAIL)}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {kind: decoder(errors="replace") for kind in STREAM_NAMES}

    async def add(self, kind: int, data: bytes) -> bool:
        """Add a piece and pass it to `on_output`; return False if the output exceeds the cap."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            return False
        self._text[kind] += data
        if self._on_output and kind in STREAM_NAMES:
            text = self._decoders[kind].decode(data)
            if text:
                await self._on_output(STREAM_NAMES[kind], text)
        return True

    def omitted_bytes(self, name: StreamName, report: OutputReport) -> int:
        """Return how many bytes of a stream the agent left out; 0 or less if none."""
        head, tail = self._head_and_tail(name)
        return report.total_bytes - len(head) - len(tail)

    def _head_and_tail(self, name: StreamName) -> tuple[bytearray, bytearray]:
        head_kind, tail_kind = KINDS[name]
        return self._text[head_kind], self._text[tail_kind]

    def text(self, name: StreamName, report: OutputReport, omitted: int, path: str) -> str:
        """Return the text of a stream: in full, or, if a part is left out, its head, a truncation
        marker and its tail. The marker names the file `path` that keeps the output, unless `path`
        is empty. `omitted` is the result of `omitted_bytes`."""
        head, tail = self._head_and_tail(name)
        if omitted <= 0:
            return (head + tail).decode(errors="replace")
        marker = truncation_marker(
            omitted, report.omitted_lines, path, report.kept_bytes, report.total_bytes
        )
        shown = head.decode(errors="replace")
        newline = "" if shown.endswith("\n") or not shown else "\n"
        return f"{shown}{newline}{marker}\n{tail.decode(errors='replace')}"

    def line_count(self, reports: Mapping[StreamName, OutputReport]) -> int:
        """Return the number of lines of both streams, including those left out. A last line without
        a newline counts."""
        count = 0
        for name in KINDS:
            head, tail = self._head_and_tail(name)
            shown = head.count(b"\n") + tail.count(b"\n")
            last = (tail or head)[-1:]
            is_open = bool(last) and last != b"\n"
            count += shown + is_open + reports[name].omitted_lines
        return count


def truncation_marker(
    omitted_bytes: int, omitted_lines: int, path: str, kept_bytes: int, total_bytes: int
) -> str:
    """Return the line that replaces the omitted part of a stream."""
    where = ""
    if path and kept_bytes < total_bytes:
        where = f"; the first {kept_bytes} bytes of it all are in {path}"
    elif path:
        where = f"; all of it is in {path}"
    return f"[... {omitted_bytes} bytes, {omitted_lines} lines left out{where} ...]"


class OutputRetention:
    """Counts the bytes of one sandbox's output files. While a command runs, the bytes that it may
    still add are reserved."""

    def __init__(self, retained_bytes: int = 0) -> None:
        self._bytes = retained_bytes

    @property
    def used_bytes(self) -> int:
        """The number of bytes that are used or reserved."""
        return self._bytes

    def reserve(self, cap: OutputCap, command_id: str | None = None) -> "RetainedFiles":
        """Reserve bytes for a command's files. `command_id` is the id that the caller has given the
        command, if any: a command that is requested again has the same files."""
        allowed = (
            min(cap.max_kept_bytes, MAX_KEPT_BYTES - self._bytes) if cap.retention_directory else 0
        )
        if allowed <= 0:
            return RetainedFiles(None, 0)
        self._bytes += allowed
        # A random name: a restored workspace may contain files of an earlier sandbox.
        name = command_id or uuid.uuid4().hex[:8]
        return RetainedFiles(f"{cap.retention_directory}/{name}", allowed)

    def release(self, files: "RetainedFiles") -> None:
        """Release the bytes that a command has reserved and not used."""
        self._bytes -= files.bytes_left

    def count_restored_files(self, size: bytes) -> None:
        """Count the files of a restored workspace; `size` is the output of PRUNE. If it is not a
        number, no output is kept from now on."""
        self._bytes += int(size) if size.strip().isdigit() else MAX_KEPT_BYTES


@dataclass(frozen=True, slots=True)
class RetainedFiles:
    """The output files of one command."""

    name: str | None
    """The common prefix of the files' paths; None if no output is kept."""
    bytes_left: int
    """Number of bytes that may still be added."""

    def path(self, stream: StreamName, reading: int, size: int) -> str:
        """Return the path of the file that keeps the output of `stream` in one reading (see
        `sandbox_runtime.protocol`), or "" if no output is kept. `reading` is the number of the
        reading, and `size` the number of bytes that the file keeps."""
        return f"{self.name}-{reading}.{stream}" if self.name is not None and size > 0 else ""

    def with_added_bytes(self, size: int) -> "RetainedFiles":
        """Return these values after `size` more bytes were written to the files."""
        if self.name is None:
            return self
        return replace(self, bytes_left=max(0, self.bytes_left - size))


def exec_result(
    job_id: str,
    report: CommandReport,
    output: CommandOutput,
    files: RetainedFiles,
    limit_events: LimitEvents,
) -> ExecResult:
    """Return the result of one reading of a command's output (see `protocol`), with the
    `limit_events` of that reading."""
    stdout, stderr = report.outputs["stdout"], report.outputs["stderr"]
    stdout_file = files.path("stdout", report.reading, stdout.kept_bytes)
    stderr_file = files.path("stderr", report.reading, stderr.kept_bytes)
    stdout_omitted = output.omitted_bytes("stdout", stdout)
    stderr_omitted = output.omitted_bytes("stderr", stderr)
    return ExecResult(
        exit_code=report.exit_code,
        stdout=output.text("stdout", stdout, stdout_omitted, stdout_file),
        stderr=output.text("stderr", stderr, stderr_omitted, stderr_file),
        timed_out=report.timed_out,
        truncated=stdout_omitted > 0 or stderr_omitted > 0,
        duration_s=report.duration_s,
        stdout_bytes=stdout.total_bytes,
        stderr_bytes=stderr.total_bytes,
        output_lines=output.line_count(report.outputs),
        cpu_s=report.cpu_s,
        peak_memory_bytes=report.peak_memory_bytes,
        oom_kills=limit_events.oom_kills,
        pids_refused=limit_events.pids_refused,
        running=report.running,
        waiting=report.waiting,
        job_id=job_id if report.running else "",
        stdout_file=stdout_file,
        stderr_file=stderr_file,
    )
