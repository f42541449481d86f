"""A Sandbox whose doing is an agent at the other end of a channel."""

import asyncio
import codecs
import json
from collections.abc import AsyncIterable, Awaitable, Mapping
from typing import NoReturn, TypeVar

from sandbox_runtime.channel import Channel, Stream
from sandbox_runtime.errors import (
    FileMissingError,
    FileTooLargeError,
    NotARegularFileError,
    SandboxFileError,
)
from sandbox_runtime.protocol import DATA, STDERR, STDERR_TAIL, TAIL
from sandbox_runtime.sandbox import (
    Entry,
    ExecResult,
    Listing,
    OnOutput,
    OutputCap,
    ShellState,
    Sink,
    StreamName,
)

T = TypeVar("T")

ANSWER_S = 4.0
"""How long after a command's time is up its outcome is awaited; the agent needs about 0.7 s."""
MAX_NUMBER = 1e18
"""Beyond any count of bytes or seconds; NaN is not below it either."""
MAX_LISTING_BYTES = 32 << 20
FILE_ERRORS: Mapping[object, type[SandboxFileError]] = {
    "missing": FileMissingError,
    "not_regular": NotARegularFileError,
    "too_large": FileTooLargeError,
}
STREAM_NAMES: Mapping[int, StreamName] = {DATA: "stdout", STDERR: "stderr"}
KINDS: Mapping[StreamName, tuple[int, int]] = {
    "stdout": (DATA, TAIL),
    "stderr": (STDERR, STDERR_TAIL),
}
REPORTED = (
    *("exit_code", "duration_s", "cpu_s", "peak_memory_bytes", "stdout_bytes", "stderr_bytes"),
    *("stdout_omitted_lines", "stderr_omitted_lines"),
)
"""The numbers of every command's report."""


class GuestSandbox:
    """One computer; see `Sandbox`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def id(self) -> str:
        return self._channel.guest.id

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cap: OutputCap = OutputCap(),
        shell_state: ShellState = "snapshot",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        request = {
            "op": "exec",
            "command": command,
            "timeout_s": timeout_s,
            "cwd": cwd,
            "env": dict(env or {}),
            "has_stdin": bool(stdin),
            "max_bytes": cap.max_bytes,
            "max_lines": cap.max_lines,
            "shell_state": shell_state,
        }
        output, clock = _Output(cap, on_output), asyncio.get_running_loop().time
        deadline = clock() + timeout_s + ANSWER_S
        stream = await self._before(deadline, self._channel.open(request))
        try:
            if stdin:
                await self._before(deadline, stream.send(stdin))
                await self._before(deadline, stream.finish_input())
            while piece := await self._before(deadline, stream.receive()):
                arrived = clock()
                if not await output.take(*piece):
                    await self._distrust("it sent more output than allowed")
                deadline += clock() - arrived  # the listener's time is not the agent's
        finally:
            self._channel.reset(stream)
        if "error" in stream.report:
            return _not_started(str(stream.report.get("message")))
        return await self._result(stream.report, output)

    async def _before(self, deadline: float, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await work
        except TimeoutError:
            await self._distrust("the agent did not end a command in time")

    async def _result(self, report: Mapping[str, object], output: "_Output") -> ExecResult:
        numbers: dict[str, float] = {}
        for key in REPORTED:
            value = report.get(key)
            if not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
                await self._distrust(f"it reported {key} as {str(value)[:80]!r}")
            numbers[key] = value
        return ExecResult(
            exit_code=int(numbers["exit_code"]),
            stdout=output.text("stdout", numbers),
            stderr=output.text("stderr", numbers),
            timed_out=report.get("timed_out") is True,
            truncated=output.truncated,
            duration_s=numbers["duration_s"],
            stdout_bytes=int(numbers["stdout_bytes"]),
            stderr_bytes=int(numbers["stderr_bytes"]),
            cpu_s=numbers["cpu_s"],
            peak_memory_bytes=int(numbers["peak_memory_bytes"]),
        )

    async def put(self, path: str, source: AsyncIterable[bytes]) -> int:
        stream = await self._channel.open({"op": "put", "path": path})
        try:
            async for data in source:
                await stream.send(data)
            await stream.finish_input()
            while await stream.receive():
                await self._distrust("it sent data where none was asked for")
        finally:
            self._channel.reset(stream)
        return await self._size(stream)

    async def get(self, path: str, sink: Sink, *, max_bytes: int) -> int:
        stream = await self._channel.open({"op": "get", "path": path, "max_bytes": max_bytes})
        received = 0
        try:
            while piece := await stream.receive():
                received += len(piece[1])
                if received > max_bytes:
                    await self._distrust("it sent more of a file than asked for")
                await sink(piece[1])
        finally:
            self._channel.reset(stream)
        if await self._size(stream) != received:
            await self._distrust("it sent less of a file than it says")
        return received

    async def list(
        self, path: str, *, max_entries: int = 10_000, max_depth: int | None = None
    ) -> Listing:
        stream = await self._channel.open(
            {"op": "list", "path": path, "max_entries": max_entries, "max_depth": max_depth}
        )
        text = bytearray()
        try:
            while piece := await stream.receive():
                text += piece[1]
                if len(text) > MAX_LISTING_BYTES:
                    await self._distrust("it sent an endless listing")
        finally:
            self._channel.reset(stream)
        self._raise_file_error(stream.report)
        entries = [_entry(line) for line in bytes(text).split(b"\n") if line]
        known = [entry for entry in entries if entry]
        if len(known) < len(entries) or len(known) > max_entries:
            await self._distrust("it sent a malformed listing")
        return Listing(
            tuple(sorted(known, key=lambda entry: entry.path)),
            truncated=stream.report.get("truncated") is True,
        )

    async def close(self) -> None:
        await self._channel.close()

    async def _size(self, stream: Stream) -> int:
        self._raise_file_error(stream.report)
        size = stream.report.get("bytes")
        if not isinstance(size, int):
            await self._distrust("it reported no size")
        return size

    def _raise_file_error(self, report: Mapping[str, object]) -> None:
        if "error" in report:
            kind = FILE_ERRORS.get(report["error"], SandboxFileError)
            raise kind(str(report.get("message"))[:1000])

    async def _distrust(self, why: str) -> NoReturn:
        await self._channel.fail(why)
        raise self._channel.lost_error()


class _Output:
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

    def text(self, name: StreamName, numbers: Mapping[str, float]) -> str:
        """A whole stream, or its head and tail with a line between that says what is left out."""
        head_kind, tail_kind = KINDS[name]
        head, tail = b"".join(self._pieces[head_kind]), b"".join(self._pieces[tail_kind])
        omitted = int(numbers[f"{name}_bytes"]) - len(head) - len(tail)
        if omitted <= 0:
            return (head + tail).decode(errors="replace")
        self.truncated = True
        lines = int(numbers[f"{name}_omitted_lines"])
        marker = f"[... {omitted} bytes, {lines} lines left out ...]"
        shown = head.decode(errors="replace")
        newline = "" if shown.endswith("\n") or not shown else "\n"
        return f"{shown}{newline}{marker}\n{tail.decode(errors='replace')}"


def _not_started(message: str) -> ExecResult:
    return ExecResult(126, "", f"{message}\n", False, False, 0.0, 0, len(message) + 1)


def _entry(line: bytes) -> Entry | None:
    """One line of a listing, if it is one that can be trusted."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match value:
        case [str(path), "file" | "directory" | "other" as kind, int(size)] if size >= 0:
            parts = path.split("/")
            if "" in parts or ".." in parts or "." in parts:
                return None
            return Entry(path, kind, size)
    return None
