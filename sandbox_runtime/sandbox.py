"""What one can do with a computer: run commands, move files, close it."""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from policies.isolation import Isolation
from sandbox_runtime.egress.decision import OnAsk, OnDecision
from sandbox_runtime.egress.limits import Meter

StreamName = Literal["stdout", "stderr"]
ShellState = Literal["snapshot", "none"]
EntryKind = Literal["file", "directory", "other"]
OnOutput = Callable[[StreamName, str], Awaitable[None]]
Sink = Callable[[bytes], Awaitable[None]]
LIST_S = 60.0
"""How long naming files may take, unless the caller has less time."""
TRANSFER_S = 300.0
"""The same of moving a file; and how long moving a snapshot may take."""


@dataclass(frozen=True, slots=True)
class OutputCap:
    """How much of each output stream leaves the sandbox: half from its start, half from its end."""

    max_bytes: int = 1 << 20
    max_lines: int = 1_000_000
    keep_in: str | None = None
    """A directory inside where a stream that is cut is kept whole; None: nowhere."""
    max_kept_bytes: int = 4 << 20
    """How much of a command's output is kept there, in all its readings."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended and what it printed.

    A stream longer than the cap is its head and tail with one line between them that says how much
    is left out, and in which file it is kept. Bytes that are not UTF-8 appear as U+FFFD.
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
    output_lines: int = 0
    """How many lines the command wrote to both streams, shown or not."""
    cpu_s: float = 0.0
    """Processor time of the command and of the children it waited for."""
    peak_memory_bytes: int = 0
    """Resident memory of the largest of these processes."""
    oom_kills: int = 0
    """Processes of the sandbox killed meanwhile because its memory had run out."""
    pids_refused: int = 0
    """Processes and threads not made meanwhile because the sandbox had too many."""
    running: bool = False
    """Whether it goes on as a job; the outcome above is then none yet, and the output that since
    it was last asked for."""
    waiting: bool = False
    """Whether the job stands still until somebody types."""
    job_id: str = ""
    """What `wait` and `stop` take while it runs."""
    stdout_file: str = ""
    """Where it is kept whole, or as much as may be; empty: it was not cut, or could not be kept."""
    stderr_file: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something found in a directory; links are `other` and never followed."""

    path: str
    """Relative to the listed directory. Bytes that are not UTF-8 are surrogate escapes."""
    kind: EntryKind
    bytes: int
    sha256: str = ""
    """Of a file, in hex, where it was asked for, could be read and is within the HashLimits."""


@dataclass(frozen=True, slots=True)
class HashLimits:
    """Which files of a listing get a hash."""

    max_file_bytes: int
    """Larger ones get none."""
    timeout_s: float
    """Files that are not read to their end by then get none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a directory, sorted by path; `truncated` when there is more."""

    entries: tuple[Entry, ...]
    truncated: bool


class Sandbox(Protocol):
    """One isolated computer, for one user, used once.

    Every method raises SandboxLostError when the computer cannot be used any more:
    SandboxGoneError where it has ended, SandboxUnreachableError where nothing is known.
    """

    @property
    def id(self) -> str:
        """A name for logs, unique among the living."""

    @property
    def meter(self) -> Meter:
        """What passes between it and the world, while it is lent."""

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = b"",
        cap: OutputCap = OutputCap(),
        shell_state: ShellState = "snapshot",
        on_output: OnOutput | None = None,
        wait_s: float | None = None,
        command_id: str | None = None,
    ) -> ExecResult:
        """Run `command` in bash and return when it ends or its time is up.

        Directory, variables and functions left behind by one command are there for the next
        (`shell_state="none"`: neither read nor kept). `cwd` and `env` hold for this command only,
        and its state is then not kept. Background processes live on. `on_output` hears each
        stream as it is written, up to the head of the cap.

        With `wait_s` it returns after so long at the latest: a command that still runs then goes on
        as a job (`ExecResult.running`), its deadline unchanged. `stdin=None` is a terminal to type
        into, or, with a line of error output that says so, a pipe where all terminals are taken; a
        command that waits for somebody to type is returned as a job at once.

        A `command_id` runs at most once: asked for again, after SandboxUnreachableError, it
        delivers what the first asking would have. Ids are letters, digits, `_` and `-`.
        """

    async def wait(
        self,
        job_id: str,
        *,
        wait_s: float,
        typed: bytes = b"",
        end_of_input: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Type into a job's terminal, if anything, and return when the job ends, waits for more to
        be typed, or after `wait_s`. The output is what came since it was last asked for.

        Raises JobMissingError.
        """

    async def stop(self, job_id: str) -> None:
        """Interrupt a job, and kill it soon if that does not end it; `wait` then tells its end.

        Raises JobMissingError.
        """

    # An operation on files is given up when its time is over, that of `source` and `sink` included:
    # it raises FileTimeoutError, and the sandbox stops working on it.

    async def put(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        new: bool = False,
        timeout_s: float = TRANSFER_S,
    ) -> int:
        """Write a file in full or not at all, parents included, and return its size.

        An existing file keeps its mode. Raises SandboxFileError; of these, where `new`,
        FileThereError if anything has that path.
        """

    async def get(
        self, path: str, sink: Sink, *, max_bytes: int, timeout_s: float = TRANSFER_S
    ) -> int:
        """Send a regular file's bytes to `sink` and return how many.

        Raises FileMissingError, NotARegularFileError (a link is one: none is followed) and
        FileTooLargeError (the sink may have had `max_bytes` by then).
        """

    async def list(
        self,
        path: str,
        *,
        max_entries: int = 10_000,
        max_depth: int | None = None,
        hashes: HashLimits | None = None,
        timeout_s: float = LIST_S,
    ) -> Listing:
        """Name what lies below a directory, following no link; with `hashes`, a manifest. What has
        no path that a system call takes (4,095 bytes) is left out.

        Raises FileMissingError, and NotARegularFileError if `path` is no directory.
        """

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        """Send the working directory and all below it to `sink`, as tar; returns its size.

        Nobody but `restore` should read it: what it says is the sandbox's. Raises FileTooLargeError
        (the sink may have had `max_bytes` by then) and SandboxFileError.
        """

    async def restore(self, source: AsyncIterable[bytes]) -> None:
        """Unpack a snapshot over the working directory. Raises SandboxFileError."""

    async def close(self) -> None:
        """End the computer and all in it. Safe to call twice; finishes when cancelled."""


class Lease(Protocol):
    """A claim to one sandbox, which may still be starting."""

    async def sandbox(self) -> Sandbox:
        """The sandbox, once it is ready; the same at every call, a new one when that is lost.

        Raises SandboxStartError and SandboxUnavailableError.
        """


class Sandboxes(Protocol):
    """Where sandboxes come from."""

    def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        on_ask: OnAsk | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """A sandbox for the length of the block, starting now and closed off the caller's path.

        `on_decision` hears of every connection that a program inside has tried to make, `on_ask`
        is asked before one is made.
        """
