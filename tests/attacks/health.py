"""Requests for /health in a process of their own, which the load of an attack does not delay.

`python -m tests.attacks.health PORT` writes a line for each answer: when the request was sent, by
the clock of `time.perf_counter`, its latency in ms, and by how many ms the pause before it was too
long. The pause shows how long any process waits for a processor. `HealthWatch` reads these lines.
"""

import asyncio
import http.client
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.servers import run_process

_PAUSE_S = 0.01
_TIMEOUT_S = 150.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class HealthSamples:
    """The measurements of a period."""

    worst_ms: float
    """The longest latency of /health."""
    scheduling_ms: float
    """The longest time that the measuring process itself waited for a processor."""


class HealthWatch:
    """The measurements so far."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []

    async def read(self, lines: asyncio.StreamReader) -> None:
        """Collect the lines of the process until it ends."""
        async for line in lines:
            sent_at, latency_ms, delay_ms = map(float, line.split())
            self._samples.append((sent_at, latency_ms, delay_ms))

    async def between(self, start: float, end: float) -> HealthSamples:
        """Return the measurements of the requests that overlap a period. Waits for those that are
        not answered yet."""
        while not self._samples or self._samples[-1][0] < end:  # noqa: ASYNC110 - lines arrive
            await asyncio.sleep(_POLL_S)
        samples = [
            (latency_ms, delay_ms)
            for sent_at, latency_ms, delay_ms in self._samples
            if sent_at < end and sent_at + latency_ms / 1000 > start
        ]
        if not samples:  # the measuring process waited for a processor all the time
            return HealthSamples(0.0, (end - start) * 1000)
        latencies, delays = zip(*samples, strict=True)
        return HealthSamples(max(latencies), max(delays))


@asynccontextmanager
async def watch_health(port: int) -> AsyncIterator[HealthWatch]:
    """Request /health again and again during the block."""
    command = [sys.executable, "-m", "tests.attacks.health", str(port)]
    watch = HealthWatch()
    async with run_process(command, stdout=asyncio.subprocess.PIPE) as child:
        assert child.stdout is not None
        reading = asyncio.create_task(watch.read(child.stdout))
        try:
            yield watch
        finally:
            reading.cancel()


def _poll(port: int) -> None:
    while True:
        paused_at = time.perf_counter()
        time.sleep(_PAUSE_S)
        delay_ms = (time.perf_counter() - paused_at - _PAUSE_S) * 1000
        sent_at = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status != 200:
                raise http.client.HTTPException
            latency_ms = (time.perf_counter() - sent_at) * 1000
        except (OSError, http.client.HTTPException):
            latency_ms = _TIMEOUT_S * 1000  # no answer counts as the longest wait
        finally:
            connection.close()
        sys.stdout.write(f"{sent_at} {latency_ms} {delay_ms}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _poll(int(sys.argv[1]))
