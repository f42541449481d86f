"""What a backend is: a byte stream to an agent in an isolated place, and a kill()."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from policies.isolation import Isolation

Take = Callable[[bytes | memoryview], float | None]
"""The callback for received bytes, which are valid during the call. Returns None, or for how many
seconds the guest should not be read before it is called again: with b"" first, as it may have kept
some of the bytes for then. Raises ProtocolError for bytes that should not have come."""


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
        """The backend's own name for it."""

    async def listen(self, take: Take) -> None:
        """Hand over the bytes that the agent writes as they come; returns when it is gone.

        Raises the ProtocolError that `take` raises.
        """

    async def drain(self) -> None:
        """Wait until there is room to write. Raises OSError when the agent is gone."""

    def write(self, data: bytes) -> None:
        """Queue for the agent, after `drain`; lost when it is gone."""

    def write_control(self, data: bytes) -> None:
        """Queue a few bytes for the agent, with or without room; lost when it is gone. An agent
        that lets too many of them wait is refused: `listen` raises ProtocolError."""

    async def kill(self) -> bool:
        """End it and everything it started; whether it is certain that nothing of it goes on.

        Safe to call twice.
        """

    async def limit(self, isolation: Isolation) -> None:
        """Change memory, cpus and pids of the running sandbox. Raises SandboxStartError."""

    def pressure(self) -> Pressure | None:
        """What the host's counters say; None where only the agent inside can read them."""

    def last_words(self) -> str:
        """The end of what the agent or the backend wrote as diagnostics, for error messages."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `doctor`."""

    name: str
    ok: bool
    detail: str


class Backend(Protocol):
    """A way to isolate."""

    @property
    def name(self) -> str:
        """As configured: docker, bubblewrap."""

    async def start(self, isolation: Isolation) -> Guest:
        """Start an agent in an isolated place. Raises SandboxStartError."""

    async def fingerprint(self) -> str:
        """What sandboxes are made from now: a digest. Raises SandboxStartError."""

    async def sweep(self) -> int:
        """Remove what dead owners on this host left behind; returns how many."""

    async def check(self) -> list[Check]:
        """Whether it can work here and what isolation is really in force."""

    async def aclose(self) -> None:
        """Give back what the backend itself holds."""
