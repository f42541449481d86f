"""What is told of each connection that a program tried to make."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal


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


OnDecision = Callable[[Decision], Awaitable[None] | None]
