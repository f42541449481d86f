"""How much passes between a sandbox and the world, and how fast."""

import asyncio
import math

from policies.egress import Egress
from sandbox_runtime.egress.errors import DeniedError

_BURST_S = 1.0


class Meter:
    """All traffic of one sandbox, both ways together."""

    def __init__(self, egress: Egress) -> None:
        self._max_mib = egress.max_mib
        self._bytes_per_s = egress.max_mib_per_s * (1 << 20)
        self._bytes = 0
        self._paid_until = -math.inf
        """When all that has passed would have passed at the allowed rate."""

    def check(self) -> None:
        """Raise DeniedError where nothing may pass any more."""
        if self._bytes >= self._max_mib << 20:
            raise DeniedError(
                f"this sandbox has used up its {self._max_mib} MiB of network traffic"
            )

    def pay(self, count: int, now: float) -> float:
        """The seconds from `now` on after which `count` bytes may pass. Raises DeniedError."""
        if self._bytes + count > self._max_mib << 20:
            self._bytes = self._max_mib << 20
        self.check()
        self._bytes += count
        start = max(self._paid_until, now - _BURST_S)
        self._paid_until = start + count / self._bytes_per_s
        return max(0.0, self._paid_until - now)

    async def take(self, count: int) -> None:
        """Return when `count` bytes may pass. Raises DeniedError."""
        if wait_s := self.pay(count, asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)
