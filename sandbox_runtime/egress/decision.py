"""The outcome of a connection that a program in a sandbox tried to make: the Decision, the
callbacks CheckTarget and OnDecision, and the errors that end a connection.

EgressError         its text is sent to the program
├ DeniedError       denied by the rules or a limit, or malformed
│ └ HelloError      the TLS ClientHello names another server, or none
└ UnreachableError  allowed, but the host did not answer
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from policies.hosts import Target


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one connection, reported when the connection has ended. It holds no path,
    header or secret."""

    host: str
    """The host of the target; empty if the connection ended before the program had named the
    target."""
    port: int
    verdict: Literal["allowed", "denied"]
    reason: str
    """The reason why the connection was denied or failed; empty if it succeeded."""
    bytes_up: int
    """Bytes from the program to the host."""
    bytes_down: int
    duration_s: float


CheckTarget = Callable[[Target], Awaitable[str | None]]
"""A function that is called before a connection that the sandbox's rules allow. It returns the
reason to deny the connection, or None."""
OnDecision = Callable[[Decision], Awaitable[None] | None]


class EgressError(Exception):
    """A connection failed; `status` is the HTTP status for the program."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class DeniedError(EgressError):
    """The connection is forbidden (403), malformed (400), too slow (408) or one too many (503), or
    its method or command is not offered (405)."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason, status)


class HelloError(DeniedError):
    """A TLS ClientHello is malformed, or names no server or one that is not the connection's
    target."""


class UnreachableError(EgressError):
    """An allowed host cannot be resolved or reached, answers wrongly (502) or does not answer
    (504)."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason, status)
