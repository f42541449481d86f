"""What is told of each connection that a program tried to make."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from policies.hosts import Target


@dataclass(frozen=True, slots=True)
class Decision:
    """One connection, when it is over. Holds no path, no header and no secret."""

    host: str
    """Empty where the program did not get to say it."""
    port: int
    verdict: Literal["allowed", "denied"]
    reason: str
    """Why it was denied, or what went wrong with it; empty where all went well."""
    bytes_up: int
    """From the program to the host."""
    bytes_down: int
    duration_s: float


OnAsk = Callable[[Target], Awaitable[str | None]]
"""Asked before a connection is made that the sandbox's rules allow: why not, if it shall not be."""
OnDecision = Callable[[Decision], Awaitable[None] | None]
