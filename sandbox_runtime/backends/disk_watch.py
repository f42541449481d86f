"""Who writes more to a shared disk than it may is found and stopped.

For disks whose driver sets no bound. Nobody can have written more than the whole disk has been
filled by since one last looked; so a sandbox is measured only when that might have brought it over
its limit, and now and then on a disk that changes. While nothing is written, all this costs one
question to the file system a second.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_REST = 4
_LONGEST_REST_S = 3.0
"""The watch rests so much longer than it has measured, but never for longer than this: whoever
makes measuring slow is not to gain time by it."""
_ROUND_S = 0.5
"""How long it measures before it rests, with the others left to the next round."""
_RESERVE_BYTES = 1 << 30
"""What is kept free on the host's disk, if it must be at the expense of sandboxes."""
_FULL_ROUND = 8
"""How many looks apart everybody is measured where anything is written or freed: what one frees
hides what another writes at the same time."""
_LARGE_BYTES = 16 << 20
"""Stopping a sandbox with less would not help the host."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a disk: directories, links and all else count as files too."""

    bytes: int = 0
    files: int = 0


class Disk(Protocol):
    """A disk that several sandboxes write to. Both methods may take a while."""

    def filled(self) -> Usage:
        """By how much it has been filled so far, by anybody, at most. Never becomes less."""

    def used(self, name: str, limit: Usage) -> Usage | None:
        """What one sandbox takes of it, counted until it is beyond `limit`; None if that cannot be
        told now."""

    def free_bytes(self) -> int | None:
        """What is left; None if that cannot be told."""


@dataclass(slots=True)
class _Watched:
    limit: Usage
    stop: Callable[[str], None]
    used: Usage
    when_measured: Usage
    """How full the disk was then."""

    def may_exceed(self, filled: Usage) -> bool:
        since = self.when_measured
        return (
            self.used.bytes + filled.bytes - since.bytes > self.limit.bytes
            or self.used.files + filled.files - since.files > self.limit.files
        )

    def excess(self) -> str:
        if self.used.bytes > self.limit.bytes:
            limit_mib = self.limit.bytes >> 20
            return f"its disk use of {_mib(self.used)} MiB exceeded the limit of {limit_mib} MiB"
        if self.used.files > self.limit.files:
            return f"it has more than the {self.limit.files} files that its disk may have"
        return ""


class DiskWatch:
    """Watches sandboxes, from when they are added until they are discarded."""

    def __init__(
        self, disk: Disk, *, period_s: float = _PERIOD_S, reserve_bytes: int = _RESERVE_BYTES
    ) -> None:
        self._disk = disk
        self._period_s = period_s
        self._reserve_bytes = reserve_bytes
        self._watched: dict[str, _Watched] = {}
        self._filled = Usage()
        self._looks = 0
        self._free: int | None = None
        self._has_changed = False
        self._watching: asyncio.Task[None] | None = None

    def add(self, name: str, limit: Usage, stop: Callable[[str], None]) -> None:
        """Watch a sandbox that has just begun; `stop` is told why, once, if it must end."""
        self._watched[name] = _Watched(limit, stop, Usage(), self._filled)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="disk watch")

    def discard(self, name: str) -> None:
        """Watch it no more. Safe to call twice, and from any thread."""
        self._watched.pop(name, None)

    async def aclose(self) -> None:
        """Watch nobody any more."""
        self._watched.clear()
        if self._watching:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        pause_s = self._period_s
        while self._watched:
            await asyncio.sleep(pause_s)
            started = time.monotonic()
            reasons = await asyncio.to_thread(self._look, dict(self._watched))
            rest_s = min(_REST * (time.monotonic() - started), _LONGEST_REST_S)
            pause_s = max(self._period_s, rest_s)
            for name, why in reasons.items():
                if watched := self._watched.pop(name, None):
                    logger.warning("sandbox %s is stopped: %s", name, why)
                    watched.stop(why)

    def _look(self, watched: dict[str, _Watched]) -> dict[str, str]:
        """Who must be stopped, and why."""
        filled = self._filled = self._disk.filled()
        everybody = self._is_full_round()
        due = {name: each for name, each in watched.items() if everybody or each.may_exceed(filled)}
        self._measure(due, filled)
        reasons = {name: why for name, each in due.items() if (why := each.excess())}
        free = self._free
        if not reasons and free is not None and free < self._reserve_bytes:
            self._measure(watched, filled)
            return dict(_largest(watched))
        return reasons

    def _is_full_round(self) -> bool:
        """Whether more may have been written of late than the disk shows."""
        before, self._free = self._free, self._disk.free_bytes()
        if before is not None and self._free != before:
            self._has_changed = True
        self._looks += 1
        if self._looks % _FULL_ROUND or not self._has_changed:
            return False
        self._has_changed = False
        return True

    def _measure(self, due: dict[str, _Watched], filled: Usage) -> None:
        """Those first whose last measurement is oldest."""
        until = time.monotonic() + _ROUND_S
        for name, each in sorted(due.items(), key=lambda item: item[1].when_measured.bytes):
            used = self._disk.used(name, each.limit)
            if used is not None:
                each.used, each.when_measured = used, filled
            if time.monotonic() > until:
                return


def _largest(watched: dict[str, _Watched]) -> Iterator[tuple[str, str]]:
    """The one that has most, with the reason to stop it."""
    name, largest = max(watched.items(), key=lambda item: item[1].used.bytes)
    if largest.used.bytes > _LARGE_BYTES:
        had = f"of all sandboxes this one had most of it, {_mib(largest.used)} MiB"
        yield name, f"the host's disk is nearly full, and {had}"


def _mib(used: Usage) -> int:
    return -(-used.bytes // (1 << 20))
