"""The interface of a sandbox: run commands, transfer files, save and restore the workspace.

`Sandboxes` leases sandboxes, and a `Lease` gives one. Open this module to see what a backend must
offer and which values the tools and the agent loop get.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from policies.isolation import Isolation
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.egress.limits import TrafficQuota

StreamName = Literal["stdout", "stderr"]
ShellState = Literal["snapshot", "none"]
EntryKind = Literal["file", "directory", "other"]
OnOutput = Callable[[StreamName, str], Awaitable[None]]
Sink = Callable[[bytes], Awaitable[None]]
SandboxReference = Mapping[str, Any]
"""Names a running sandbox, so that another process can adopt it. The value is JSON, and secret."""
LIST_TIMEOUT_S = 60.0
"""Default timeout of a listing."""
TRANSFER_TIMEOUT_S = 300.0
"""Default timeout of a file transfer, and the timeout of a snapshot and of a restore."""


@dataclass(frozen=True, slots=True)
class OutputCap:
    """Limits on what is returned of each output stream. A stream that exceeds a limit is returned
    as its start and its end, each up to half of the limit."""

    max_bytes: int = 1 << 20
    max_lines: int = 1_000_000
    retention_directory: str | None = None
    """A directory inside the sandbox where the full output of a truncated stream is kept; None: it
    is not kept."""
    max_kept_bytes: int = 4 << 20
    """Maximum number of bytes of one command's output that are kept in `retention_directory`."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The exit code and the output of a command.

    If a stream exceeds the cap, `stdout` or `stderr` has its head and its tail, with a line between
    them that says how much is left out and which file has the full output. Bytes that are not UTF-8
    appear as U+FFFD.
    """

    exit_code: int
    """The exit code as bash reports it: 128 + n if signal n ended the command."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """True if either stream exceeded the cap."""
    duration_s: float
    stdout_bytes: int
    """Number of bytes that the command wrote to stdout, including those left out."""
    stderr_bytes: int
    output_lines: int = 0
    """Number of lines that the command wrote to both streams, including those left out."""
    cpu_s: float = 0.0
    """CPU time of the command and of the children that it waited for."""
    peak_memory_bytes: int = 0
    """Peak resident memory of the largest process among the command and the children that it waited
    for."""
    oom_kills: int = 0
    """Number of processes of the sandbox that were killed during the command because memory ran
    out."""
    pids_refused: int = 0
    """Number of processes and threads that could not be created during the command, because too
    many existed."""
    running: bool = False
    """True if the command still runs, as a job. The result then has no exit code yet, and only the
    output since the last call."""
    waiting: bool = False
    """True if the job waits for input on its terminal."""
    job_id: str = ""
    """The id for `wait` and `stop` while the command runs."""
    stdout_file: str = ""
    """The path of the file that keeps stdout from its start, in full if `OutputCap` allows it. The
    path is empty if stdout is not truncated or not kept."""
    stderr_file: str = ""
    """The path of the file that keeps stderr; see `stdout_file`."""


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """An entry of a directory. A link has the kind `other` and is never followed."""

    path: str
    """The path relative to the listed directory. Bytes that are not UTF-8 are surrogate escapes."""
    kind: EntryKind
    bytes: int
    sha256: str = ""
    """The hex digest of a file, if requested, readable and within the HashLimits; else empty."""


@dataclass(frozen=True, slots=True)
class HashLimits:
    """Limits on the hashing of files in a listing."""

    max_file_bytes: int
    """Larger files get no hash."""
    timeout_s: float
    """Maximum time for the hashes of a listing. Files that are not read completely by then get no
    hash."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries below a directory, sorted by path; `truncated` if some are left out."""

    entries: tuple[DirectoryEntry, ...]
    truncated: bool


class Sandbox(Protocol):
    """An isolated machine for one lease. Once the machine cannot be used any more, every method
    except `close` raises SandboxLostError."""

    @property
    def id(self) -> str:
        """A name for logs, unique among running sandboxes."""

    @property
    def traffic(self) -> TrafficQuota:
        """Counts and limits the sandbox's network traffic during its lease."""

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
        """Run `command` in bash and return when it ends or times out.

        The working directory, variables and functions carry over from one command to the next,
        unless `shell_state="none"`. `cwd` and `env` apply to this command only. No state
        carries over from a command that has `cwd` or `env`, is stopped or times out. Background
        processes keep running. `on_output` receives the head of each stream as it is written.

        With `wait_s` the call returns after that time at the latest. A command that still runs then
        becomes a job (`ExecResult.running`) with an unchanged deadline. With `stdin=None` standard
        input is a terminal, or a pipe if no terminal is free (standard error says so). A command
        that waits for input on its terminal becomes a job at once.

        A command that cannot be started has exit code 126, with the reason in `stderr`.

        A call with a `command_id` does not start the command a second time: it attaches to the
        command that an earlier call has started under the same id. Once the command's final result
        has been returned, the id is free again; after `reference`, only once `forget_results` was
        called. Ids have letters, digits, `_` and `-`.
        """

    async def wait(
        self,
        job_id: str,
        *,
        wait_s: float,
        typed_bytes: bytes = b"",
        end_of_input: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Write `typed_bytes` to a job's terminal and return when the job ends or waits for more
        input, after `wait_s` at the latest. The result has the output since the last call.

        Raises JobMissingError.
        """

    async def stop(self, job_id: str) -> None:
        """Interrupt a job, and kill it if it does not end soon; `wait` then returns its result.

        Raises JobMissingError.
        """

    # File operations raise FileTimeoutError after `timeout_s`, which includes the time spent in
    # `source` and `sink`; the sandbox then stops the operation.

    async def put(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        new: bool = False,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> int:
        """Write a file atomically, create its parent directories, and return its size.

        An existing file keeps its mode. Raises SandboxFileError; with `new`, PathExistsError if
        the path exists.
        """

    async def get(
        self, path: str, sink: Sink, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> int:
        """Send the bytes of a regular file to `sink` and return how many there were.

        Raises FileMissingError, NotARegularFileError (also for a link, which is never followed)
        and FileSizeLimitError (`sink` may have received up to `max_bytes` by then).
        """

    async def list(
        self,
        path: str,
        *,
        max_entries: int = 10_000,
        max_depth: int | None = None,
        hashes: HashLimits | None = None,
        timeout_s: float = LIST_TIMEOUT_S,
    ) -> Listing:
        """List the entries below a directory without following links; with `hashes`, also hash
        the files. Entries with a path longer than 4,095 bytes are left out.

        Raises FileMissingError, and NotARegularFileError if `path` is not a directory.
        """

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        """Send the working directory to `sink` as a tar archive and return its size.

        The archive is untrusted: only `restore` may read it, inside a sandbox.

        Raises FileSizeLimitError (`sink` may have received up to `max_bytes` by then) and
        SandboxFileError.
        """

    async def restore(self, source: AsyncIterable[bytes]) -> None:
        """Unpack a snapshot into the working directory. Raises SandboxFileError."""

    def reference(self) -> SandboxReference | None:
        """Return a reference with which another process, once this process is dead, can adopt the
        sandbox with its commands and jobs; None if the backend cannot do that. From now on the
        final results of commands with a `command_id` are kept, so that the other process can get
        them again."""

    def abandon(self) -> None:
        """Leave the sandbox to the process that adopts it, because others have found this process
        dead. The sandbox is lost here, and `close` does not end it. Do nothing if no reference was
        returned."""

    def forget_results(self) -> None:
        """Forget the kept results that have been returned so far."""

    async def close(self) -> None:
        """End the sandbox, even if the caller is cancelled. Safe to call twice."""


class Lease(Protocol):
    """The right to use one sandbox, which may still be starting."""

    @property
    def command_id(self) -> str | None:
        """The id for the command of the current tool call (see `Sandbox.exec`), or None if the
        command needs none."""

    async def sandbox(self) -> Sandbox:
        """Wait until the sandbox is ready and return it. All calls return the same sandbox; once it
        is lost, they return a new one.

        Raises SandboxStartError and NoFreeSandboxError, and SandboxLostError if the lease is over.
        """


class Sandboxes(Protocol):
    """Leases sandboxes."""

    @property
    def can_adopt(self) -> bool:
        """True if a sandbox survives its process for a while, so that another process can adopt
        it."""

    def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Lease a sandbox for the length of the block. The sandbox starts at once. After the block
        the sandbox is closed in the background if the lease has used it; otherwise another lease
        may get it.

        If leases must wait, their owners take turns; the leases of one owner keep their order.

        With `adopted`, the first sandbox of the lease is the one that the reference names, adopted
        from another process. It counts towards the limits, but the lease does not wait. If it
        cannot be adopted, `Lease.sandbox` raises SandboxStartError.

        `on_decision` is called after every connection that a program in the sandbox tried to make.
        `check_target` is called before a connection is made and may deny it.
        """
