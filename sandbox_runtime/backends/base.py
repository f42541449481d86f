"""The interface of a backend, which starts agents in isolated places, and of a guest, the byte
stream to one agent; and the task that sweeps what dead proxies left behind."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from policies.isolation import Isolation
from sandbox_runtime.clock import Clock

logger = logging.getLogger(__name__)

SWEEP_S = 60.0

Take = Callable[[bytes | memoryview], float | None]
"""The callback for received bytes, which are valid during the call only. It returns None, or for
how many seconds the guest should not be read; after these it is called with b"", because it may
have kept some of the bytes for then. It raises ProtocolError for bytes that break the protocol."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """How often a limit was hit since the sandbox began."""

    oom_kills: int = 0
    """Processes killed because memory had run out."""
    pids_refused: int = 0
    """Processes and threads that were not made because there were too many."""


class Guest(Protocol):
    """A running agent, seen from the host: bytes in, bytes out, and an end."""

    @property
    def id(self) -> str:
        """The backend's own name for the guest."""

    async def listen(self, take: Take) -> None:
        """Call `take` with the bytes that the agent writes, as they arrive; return when the agent
        is gone. Raises the ProtocolError that `take` raises."""

    async def drain(self) -> None:
        """Wait until there is room to write. Raises OSError when the agent is gone."""

    def write(self, data: bytes) -> None:
        """Queue for the agent, after `drain`; lost when it is gone."""

    def write_control(self, data: bytes) -> None:
        """Queue a few bytes for the agent, with or without room; lost when it is gone. If the agent
        leaves too many of them unread, `listen` raises ProtocolError."""

    async def kill(self) -> bool:
        """End the agent and everything it started; return whether it is certain that nothing of it
        goes on. Safe to call twice."""

    async def limit(self, isolation: Isolation) -> None:
        """Change memory, cpus and pids of the running sandbox. Raises SandboxStartError."""

    def pressure(self) -> Pressure | None:
        """Return the host's counters; None where only the agent inside can read them."""

    def last_words(self) -> str:
        """Return the end of what the agent or the backend wrote as diagnostics."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `doctor`."""

    name: str
    ok: bool
    detail: str


class Backend(Protocol):
    """Starts agents in one kind of isolated place."""

    @property
    def name(self) -> str:
        """The configured name: docker, bubblewrap."""

    async def start(self, isolation: Isolation) -> Guest:
        """Start an agent in an isolated place. Raises SandboxStartError."""

    async def fingerprint(self) -> str:
        """Return a digest of what sandboxes are made from now. Raises SandboxStartError."""

    async def sweep(self) -> int:
        """Remove what dead owners on this host left behind; return how many sandboxes."""

    async def check(self) -> list[Check]:
        """Report whether the backend can work here and what isolation is really in force."""

    async def aclose(self) -> None:
        """Release what the backend itself holds."""


async def sweep_forever(backend: Backend, clock: Clock) -> None:
    """Sweep now and every SWEEP_S seconds, until cancelled."""
    while True:
        try:
            removed = await backend.sweep()
        except OSError as error:  # a lock or a cgroup that another process has just removed
            logger.warning("leftovers could not be swept, the next sweep will: %s", error)
        else:
            if removed:
                logger.info("removed %d sandboxes that dead owners had left behind", removed)
        await clock.sleep(SWEEP_S)
