"""Limits of a sandbox's egress: the timeouts of one connection, and the traffic quota of all
connections together."""

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from policies.egress import Egress
from sandbox_runtime.egress.decision import DeniedError

T = TypeVar("T")
_BURST_S = 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of one connection, in seconds."""

    head_s: float = 10.0
    """Maximum time to receive a whole request head, SOCKS greeting or ClientHello."""
    connect_s: float = 5.0
    """Maximum time to resolve a name, and to connect to each of its addresses."""
    idle_s: float = 120.0
    """Maximum time without a byte in either direction."""
    linger_s: float = 2.0
    """Maximum time for the peer to close a connection after everything was sent to it."""

    async def wait_for_head(self, head: Awaitable[T]) -> T:
        """Await a head that the program sends. Raises DeniedError after `head_s`."""
        try:
            async with asyncio.timeout(self.head_s):
                return await head
        except TimeoutError as error:
            raise DeniedError(f"no complete request within {self.head_s:g} s", 408) from error


class TrafficQuota:
    """Counts and limits the network traffic of one sandbox, both directions together."""

    def __init__(self, egress: Egress = Egress()) -> None:
        self.bytes = 0
        """Bytes counted so far, both directions together."""
        self._bytes_per_s = egress.max_mib_per_s * (1 << 20)
        self._cap_bytes: int | None = None
        self._free_at = -math.inf
        """The time at which all traffic so far would have passed at the allowed rate."""

    def limit_further_traffic(self, count: int) -> None:
        """Limit the traffic from now on to `count` bytes. Another call replaces the limit."""
        self._cap_bytes = self.bytes + max(0, count)

    def check(self) -> None:
        """Raise DeniedError if the quota is used up."""
        if self._cap_bytes is not None and self.bytes >= self._cap_bytes:
            raise DeniedError("the budget for network traffic is used up")

    def reserve(self, count: int, now: float) -> float:
        """Count the bytes and return the seconds to wait before they may pass. Raises DeniedError
        if they exceed the quota, which then counts as used up."""
        if self._cap_bytes is not None and self.bytes + count > self._cap_bytes:
            self.bytes = max(self.bytes, self._cap_bytes)
        self.check()
        self.bytes += count
        start = max(self._free_at, now - _BURST_S)
        self._free_at = start + count / self._bytes_per_s
        return max(0.0, self._free_at - now)

    async def consume(self, count: int) -> None:
        """Count `count` bytes and wait until they may pass. Raises DeniedError if they exceed the
        quota."""
        if wait_s := self.reserve(count, asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)
