"""What one can do with a computer: run commands, move files, close it."""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from policies.isolation import Isolation

StreamName = Literal["stdout", "stderr"]
ShellState = Literal["snapshot", "none"]
EntryKind = Literal["file", "directory", "other"]
OnOutput = Callable[[StreamName, str], Awaitable[None]]
Sink = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class OutputCap:
    """How much of each output stream leaves the sandbox: half from its start, half from its end."""

    max_bytes: int = 1 << 20
    max_lines: int = 1_000_000


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended and what it printed.

    A stream longer than the cap is its head and tail with one line between them that says how much
    is left out. Bytes that are not UTF-8 appear as U+FFFD.
    """

    exit_code: int
    """As bash reports it: 128 + n when signal n ended the command."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """Whether either stream was longer than the cap."""
    duration_s: float
    stdout_bytes: int
    """How many bytes the command wrote, shown or not."""
    stderr_bytes: int
    cpu_s: float = 0.0
    """Processor time of the command and of the children it waited for."""
    peak_memory_bytes: int = 0
    """Resident memory of the largest of these processes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something found in a directory; links are `other` and never followed."""

    path: str
    """Relative to the listed directory. Bytes that are not UTF-8 are surrogate escapes."""
    kind: EntryKind
    bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a directory, sorted by path; `truncated` when there is more."""

    entries: tuple[Entry, ...]
    truncated: bool


class Sandbox(Protocol):
    """One isolated computer, for one user, used once.

    Every method raises SandboxLostError when the computer is gone.
    """

    @property
    def id(self) -> str:
        """A name for logs, unique among the living."""

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
        """Run `command` in bash and return when it ends or its time is up.

        Directory, variables and functions left behind by one command are there for the next
        (`shell_state="none"`: neither read nor kept). `cwd` and `env` hold for this command only,
        and its state is then not kept. Background processes live on. `on_output` hears each
        stream as it is written, up to the head of the cap.
        """

    async def put(self, path: str, source: AsyncIterable[bytes]) -> int:
        """Write a file in full or not at all, parents included, and return its size.

        An existing file keeps its mode. Raises SandboxFileError.
        """

    async def get(self, path: str, sink: Sink, *, max_bytes: int) -> int:
        """Send a regular file's bytes to `sink` and return how many.

        Raises FileMissingError, NotARegularFileError (a link is one: none is followed) and
        FileTooLargeError (the sink may have had `max_bytes` by then).
        """

    async def list(
        self, path: str, *, max_entries: int = 10_000, max_depth: int | None = None
    ) -> Listing:
        """Name what lies below a directory, following no link.

        Raises FileMissingError, and NotARegularFileError if `path` is no directory.
        """

    async def close(self) -> None:
        """End the computer and all in it. Safe to call twice; finishes when cancelled."""


class Lease(Protocol):
    """A claim to one sandbox, which may still be starting."""

    async def sandbox(self) -> Sandbox:
        """The sandbox, once it is ready; the same at every call. Raises SandboxStartError."""


class Sandboxes(Protocol):
    """Where sandboxes come from."""

    def lease(self, isolation: Isolation) -> AbstractAsyncContextManager[Lease]:
        """A sandbox for the length of the block, starting now and closed off the caller's path."""
