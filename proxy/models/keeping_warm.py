"""Keeps a connection to the backend open while something else is done."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

_LOG = logging.getLogger(__name__)
_MAX_PROBES = 100
"""The most in one block: five minutes where connections are kept for four seconds."""
_PROBE_END_S = 1.0


class KeepingWarm:
    """Calls `probe` every `every_s` seconds while its block runs. A block that is shorter costs
    one timer."""

    def __init__(self, every_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        self._every_s = every_s
        self._probe = probe
        self._probes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        self._schedule()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._start_probe)

    def _start_probe(self) -> None:
        self._probes += 1
        self._probing = asyncio.ensure_future(self._probe())
        self._probing.add_done_callback(self._done)

    def _done(self, probing: asyncio.Future[None]) -> None:
        if not probing.cancelled() and (error := probing.exception()):
            _LOG.warning("keeping the backend's connection open failed: %r", error)
        elif self._timer is not None and self._probes < _MAX_PROBES:
            self._schedule()

    async def __aexit__(self, *_: object) -> None:
        """Wait a moment for the end of a probe, for the connection is the next call's."""
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._probing is not None and not self._probing.done():
            await asyncio.wait({self._probing}, timeout=_PROBE_END_S)
            self._probing.cancel()
