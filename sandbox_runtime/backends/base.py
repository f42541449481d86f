"""The interfaces of sandbox backends. A `Backend` starts isolated guest agents, and a `Guest` is
one running agent. `sweep_forever` removes the sandboxes of dead proxies."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import anyio

from policies.isolation import Isolation
from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.sandbox import SandboxReference

logger = logging.getLogger(__name__)

SWEEP_S = 60.0

T = TypeVar("T")

DataCallback = Callable[[bytes | memoryview], float | None]
"""A function that processes received bytes, which are valid only during the call. It returns None,
or the seconds for which the guest should not be read. After such a pause it is called with b"", so
that it can process bytes that it has kept. Raises ProtocolError for bytes that break the
protocol."""


@dataclass(frozen=True, slots=True)
class LimitEvents:
    """The numbers of times that a sandbox has hit its limits: since its start, or during one
    reading of a command's output. `sandbox_runtime.protocol` defines readings."""

    oom_kills: int = 0
    """Number of processes that were killed because memory ran out."""
    pids_refused: int = 0
    """Number of processes and threads that could not be created because too many existed."""


class Guest(Protocol):
    """A running guest agent. The host talks to the agent over a byte stream, sets its limits and
    ends it."""

    @property
    def id(self) -> str:
        """The backend's name for the guest, which log lines show."""

    async def receive(self, on_data: DataCallback) -> None:
        """Call `on_data` with the bytes that the agent writes, as they arrive, and return when the
        agent has ended. Raises the ProtocolError that `on_data` raises."""

    async def drain(self) -> None:
        """Wait until the write buffer has room. Raises OSError if the agent has ended."""

    def write(self, data: bytes) -> None:
        """Queue data for the agent; await `drain` first. Does nothing if the agent has ended."""

    def write_control(self, data: bytes) -> None:
        """Queue a few bytes for the agent even if the buffer has no room. If the agent leaves too
        many of them unread, `receive` raises ProtocolError."""

    async def kill(self) -> None:
        """End the agent and everything that it started. Safe to call twice."""

    async def resize(self, isolation: Isolation) -> None:
        """Set memory, cpus and pids of the running sandbox. Raises SandboxStartError."""

    def limit_events(self) -> LimitEvents | None:
        """Return the limit events that the host has counted, or None if only the agent can count
        them."""

    def reference(self) -> SandboxReference | None:
        """Return a reference for `Backend.adopt` in another process, or None if the backend cannot
        adopt guests."""

    def abandon(self) -> None:
        """Close the connection and leave the guest to the process that adopts it. `kill` then does
        not end the guest. Does nothing if `reference` was not called or returned None."""

    def diagnostics(self) -> str:
        """Return the end of the agent's standard error, and the reason why the agent ended if the
        backend knows it."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of `sandbox-proxy doctor`."""

    name: str
    ok: bool
    detail: str


class Backend(Protocol):
    """Starts guest agents in one kind of sandbox, such as Docker containers."""

    @property
    def name(self) -> str:
        """The name in the configuration: docker, bubblewrap or kubernetes."""

    @property
    def accepted_escapes(self) -> Mapping[str, str]:
        """The escape attempts (see `sandbox_runtime.escape`) that succeed by the design of the
        backend or its settings. Maps the name of each attempt to the reason why that is
        accepted."""

    @property
    def capacity(self) -> int | None:
        """Maximum number of sandboxes now, or None if only the pool limits it."""

    @property
    def parallel_starts(self) -> int:
        """Number of sandboxes that may start at a time, unless the settings contain another number.
        More starts at a time would slow down every start."""

    @property
    def can_resize(self) -> bool:
        """False if the limits of a running sandbox can never be changed."""

    @property
    def max_outage_s(self) -> float:
        """Seconds that a running sandbox survives without a connection, while the backend connects
        to it again; 0 if a sandbox ends with its connection."""

    async def start(self, isolation: Isolation) -> Guest:
        """Start a guest agent in a new sandbox. Raises SandboxStartError, or its subclass
        NoCapacityError if a later start may succeed."""

    @property
    def can_adopt(self) -> bool:
        """True if a guest survives the end of its proxy process for a while, so that another proxy
        process can adopt the guest."""

    async def adopt(self, reference: SandboxReference) -> Guest:
        """Attach to a guest of a process that is dead. The caller makes sure that no other process
        does so at the same time. The guest then belongs to this process: bytes from its earlier
        process have no effect, and that process cannot end the guest. Raises SandboxStartError, or
        its subclass SandboxGoneError if the guest is gone or was adopted already."""

    async def fingerprint(self) -> str:
        """Return an id of the image that new sandboxes start from. Raises SandboxStartError."""

    async def sweep(self) -> int:
        """Remove the sandboxes that dead owners left behind, on this host or in this cluster.
        Return their number."""

    async def check(self) -> list[Check]:
        """Check whether the backend works on this host, and report the isolation in force."""

    async def aclose(self) -> None:
        """Release the backend's own resources."""


def cannot_adopt_error(backend_name: str) -> SandboxStartError:
    """Return the error that `Backend.adopt` raises if the backend cannot adopt guests."""
    return SandboxStartError(f"sandboxes of the backend {backend_name} end with their server")


def parallel_starts_per_host() -> int:
    """Return how many sandboxes may start at a time on one host: two for each core that this
    process may use."""
    return 2 * len(os.sched_getaffinity(0))


async def sweep_forever(backend: Backend, clock: Clock) -> None:
    """Call `backend.sweep` now and every SWEEP_S seconds, until cancelled."""
    while True:
        try:
            removed = await backend.sweep()
        except OSError as error:  # such as a lock or cgroup that another process has just removed
            logger.warning("leftovers could not be swept, the next sweep tries again: %s", error)
        else:
            if removed:
                logger.info("removed %d sandboxes of dead owners", removed)
        await clock.sleep(SWEEP_S)


async def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if the caller is cancelled meanwhile."""
    doing = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([doing])
        raise
