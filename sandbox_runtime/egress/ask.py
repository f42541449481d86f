"""What a program asks for, in whichever language it asks."""

from collections.abc import Callable
from dataclasses import dataclass

from policies.hosts import Target
from sandbox_runtime.egress.errors import EgressError
from sandbox_runtime.egress.request_head import RequestHead


@dataclass(frozen=True, slots=True)
class Ask:
    """A program's wish to reach a host."""

    target: Target
    granted: bytes = b""
    """What the program is told when the host has been reached."""
    request: RequestHead | None = None
    """A plain HTTP request that goes there; None for a tunnel."""


Refusal = Callable[[EgressError], bytes]
"""How a language says no."""
