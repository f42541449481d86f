"""How much passes between a sandbox and the world, and how fast."""

import asyncio
import math

from policies.egress import Egress
from sandbox_runtime.egress.errors import DeniedError

_BURST_S = 1.0


class Meter:
    """All traffic of one sandbox, both ways together."""

    def __init__(self, egress: Egress = Egress()) -> None:
        self.bytes = 0
        """All that has passed so far."""
        self._life_bytes = egress.max_mib << 20
        self._bytes_per_s = egress.max_mib_per_s * (1 << 20)
        self._allowed_bytes: int | None = None
        self._paid_until = -math.inf
        """When all that has passed would have passed at the allowed rate."""

    def allow(self, count: int) -> None:
        """Let no more than so many bytes pass from now on, until told otherwise."""
        self._allowed_bytes = self.bytes + max(0, count)

    def check(self) -> None:
        """Raise DeniedError where nothing may pass any more."""
        if self.bytes >= self._life_bytes:
            mib = self._life_bytes >> 20
            raise DeniedError(f"this sandbox has used up its {mib} MiB of network traffic")
        if self._allowed_bytes is not None and self.bytes >= self._allowed_bytes:
            raise DeniedError("the budget for network traffic is used up")

    def pay(self, count: int, now: float) -> float:
        """The seconds from `now` on after which `count` bytes may pass. Raises DeniedError."""
        most = self._life_bytes
        if self._allowed_bytes is not None:
            most = min(most, self._allowed_bytes)
        if self.bytes + count > most:
            self.bytes = max(self.bytes, most)
        self.check()
        self.bytes += count
        start = max(self._paid_until, now - _BURST_S)
        self._paid_until = start + count / self._bytes_per_s
        return max(0.0, self._paid_until - now)

    async def take(self, count: int) -> None:
        """Return when `count` bytes may pass. Raises DeniedError."""
        if wait_s := self.pay(count, asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)
