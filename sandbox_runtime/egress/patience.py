"""How long each step of a connection may take."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from sandbox_runtime.egress.errors import DeniedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of time, in seconds."""

    head_s: float = 10.0
    """For a whole request, SOCKS greeting or ClientHello, from its first byte to its last."""
    connect_s: float = 5.0
    """For resolving a name, and for each of its addresses."""
    idle_s: float = 120.0
    """With no byte passed in either direction."""
    linger_s: float = 2.0
    """For the other side to close as well, once all is said."""

    async def for_head(self, head: Awaitable[T]) -> T:
        """Wait for what a program has to say first. Raises DeniedError."""
        try:
            async with asyncio.timeout(self.head_s):
                return await head
        except TimeoutError as error:
            raise DeniedError(f"no complete request within {self.head_s:g} s", 408) from error
