"""What is tried against a sandbox's walls, and what was found."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from sandbox_runtime.backends.base import Check
from sandbox_runtime.escape.ground import Ground

Wall = Literal[
    "system calls",
    "namespaces",
    "sockets",
    "settings",
    "devices",
    "privileges",
    "network",
    "processes",
    "host",
    "files",
    "bombs",
    "protocol",
    "egress",
]
Verdict = Literal["held", "open", "not tried"]


@dataclass(frozen=True, slots=True)
class Probe:
    """An attempt from inside."""

    name: str
    wall: Wall
    tries: str
    """What it does, in one sentence."""
    own_kernel_holds: bool
    """Whether a kernel of the sandbox's own is wall enough, whatever that lets pass."""


@dataclass(frozen=True, slots=True)
class Attack:
    """An attempt that shows on the host's side, or takes more than one sandbox."""

    name: str
    wall: Wall
    tries: str
    make: Callable[[Ground], Awaitable[str | None]]
    """Returns what it found open, and None where the wall held.

    Raises DisturbedError where another sandbox felt it, SandboxError where it could not be made.
    """
    own_kernel_holds: bool = False
    """As of a Probe."""
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one attempt."""

    probe: str
    wall: Wall
    verdict: Verdict
    """`not tried` says nothing about the wall, and never counts as held."""
    detail: str

    def check(self) -> Check:
        """As `doctor` prints it."""
        detail = self.detail or "closed"
        said = detail if self.verdict == "held" else f"{self.verdict.upper()}: {detail}"
        return Check(f"{self.wall}: {self.probe}", self.verdict == "held", said)
