"""What a backend is: a byte stream to an agent in an isolated place, and a kill()."""

from dataclasses import dataclass
from typing import Protocol

from policies.isolation import Isolation


class Guest(Protocol):
    """A running agent, seen from the host: bytes in, bytes out, and an end."""

    @property
    def id(self) -> str:
        """The backend's own name for it."""

    async def receive(self) -> bytes:
        """The next bytes the agent wrote; b"" when it is gone."""

    def write(self, data: bytes) -> None:
        """Queue for the agent without waiting; lost when it is gone."""

    async def send(self, data: bytes) -> None:
        """Write to the agent, waiting while its pipe is full. Raises OSError when it is gone."""

    async def kill(self) -> None:
        """End it and everything it started. Safe to call twice."""

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

    async def sweep(self) -> int:
        """Remove what dead owners on this host left behind; returns how many."""

    async def check(self) -> list[Check]:
        """Whether it can work here and what isolation is really in force."""

    async def aclose(self) -> None:
        """Give back what the backend itself holds."""
