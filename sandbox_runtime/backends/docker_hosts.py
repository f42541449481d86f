"""Sandboxes on several Docker engines; each engine has a backend of its own.

A new sandbox starts on the engine that uses the smallest share of its `max_sandboxes`. An engine
that does not answer or fails its checks gets no new sandboxes, and is tried again with backoff. The
sandboxes of the other engines are not affected.

This module does not import Docker's SDK, so that the proxy can name the class without it.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from policies.isolation import Isolation
from policies.pool import start_backoff_s
from sandbox_runtime.backends.base import (
    Backend,
    Check,
    Guest,
    cannot_adopt_error,
    parallel_starts_per_host,
)
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.errors import NoCapacityError, SandboxError, SandboxStartError
from sandbox_runtime.sandbox import SandboxReference

if TYPE_CHECKING:
    from sandbox_runtime.backends.docker import DockerBackend

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""Maximum time for an engine to return the id of its image. After it, the engine gets no new
sandboxes."""
OPEN_TIMEOUT_S = 10.0
"""Maximum time that `DockerHosts.open` waits for every engine. After it, one usable engine is
enough."""
USE_TIMEOUT_S = 300.0
"""Maximum time of one attempt to use an engine, with its checks and the self-test."""
FAILED_START_S = 10.0
"""Time for which an engine that has failed to start a sandbox ranks behind those that have not."""
FULL_RETRY_AFTER_S = 5.0
NOT_TRIED = "not tried yet"

Admit = Callable[[Backend], Awaitable[None]]
"""A function that checks the backend of one engine. Raises SandboxError if the engine must not get
sandboxes."""


@dataclass(frozen=True, slots=True)
class HostStats:
    """The state of one engine."""

    url: str
    is_up: bool
    """True if the engine gets new sandboxes."""
    sandboxes: int
    """Number of this process's sandboxes on the engine, each counted from before its start until
    its removal."""


class DockerHost:
    """One engine, which may not answer yet. `connect` blocks until it returns the engine's backend
    or raises SandboxStartError."""

    def __init__(
        self, url: str, connect: Callable[[], "DockerBackend"], max_sandboxes: int
    ) -> None:
        self.url = url
        self.max_sandboxes = max_sandboxes
        self.backend: DockerBackend | None = None
        """None until the engine has answered once."""
        self.failure: str | None = NOT_TRIED
        """The reason why the engine gets no new sandboxes; None if it gets them."""
        self.lost = asyncio.Event()
        """Set after an engine that was usable has failed, until it is usable again."""
        self.tried = asyncio.Event()
        """Set after the first attempt to use the engine."""
        self.image = ""
        """The id of the engine's image."""
        self.failed_start_at_s = -math.inf
        """The event loop's time of the last start that failed."""
        self.uncounted_starts: set[asyncio.Task[Guest]] = set()
        """Tasks that start sandboxes which the backend does not count yet."""
        self._connect = connect
        self._discard_tasks: set[asyncio.Task[None]] = set()

    @property
    def stats(self) -> HostStats:
        return HostStats(self.url, self.failure is None, self.sandbox_count)

    @property
    def sandbox_count(self) -> int:
        counted = self.backend.sandbox_count if self.backend else 0
        return counted + len(self.uncounted_starts)

    @property
    def discarded_start_count(self) -> int:
        """Number of starts that were given up and whose containers are not removed yet."""
        return len(self._discard_tasks)

    @property
    def has_room(self) -> bool:
        return self.failure is None and self.sandbox_count < self.max_sandboxes

    async def open(self) -> "DockerBackend":
        """Connect to the engine at the first call, and return its backend. Raises
        SandboxStartError."""
        if self.backend is None:
            self.backend = await asyncio.to_thread(self._connect)
        return self.backend

    async def start(self, isolation: Isolation) -> Guest:
        """Start a sandbox. Raises SandboxStartError, also if the engine stops answering."""
        starting = asyncio.create_task(self._start(isolation))
        self.uncounted_starts.add(starting)
        starting.add_done_callback(self.uncounted_starts.discard)
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait((starting, losing), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise SandboxStartError(f"the engine does not answer: {self.failure}")
            return starting.result()
        except BaseException:
            # The removal of the container may take as long as the engine does not answer.
            discarding = asyncio.create_task(_discard(starting))
            self._discard_tasks.add(discarding)
            discarding.add_done_callback(self._discard_tasks.discard)
            with anyio.CancelScope(shield=True):
                await asyncio.wait((discarding, losing), return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            losing.cancel()

    async def _start(self, isolation: Isolation) -> Guest:
        task = asyncio.current_task()
        assert task is not None
        assert self.backend
        self.uncounted_starts.discard(task)  # from here on the backend counts the sandbox
        return await self.backend.start(isolation)

    async def aclose(self) -> None:
        """Wait for the end of the starts that were given up, and close the backend."""
        if self._discard_tasks:
            await asyncio.wait(self._discard_tasks)
        if self.backend:
            await self.backend.aclose()


async def _discard(starting: asyncio.Task[Guest]) -> None:
    """Cancel the start of a sandbox. If the sandbox has started nevertheless, end it."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and not starting.exception():
        await starting.result().kill()


class DockerHosts:
    """A backend that starts sandboxes on several engines; see `Backend`.

    Connects to the engines in `open`, or at its first use. Log lines and `stats` name the engines
    that cannot be used.
    """

    def __init__(
        self,
        hosts: Sequence[DockerHost],
        clock: Clock | None = None,
        *,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.hosts = hosts
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock or SystemClock()
        self._admit: Admit | None = None
        self._recovery_tasks: dict[DockerHost, asyncio.Task[None]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._swept_count = 0
        """Number of leftovers that were removed from engines before their first use and that
        `sweep` has not returned yet."""

    @property
    def name(self) -> str:
        return "docker"

    @property
    def accepted_escapes(self) -> Mapping[str, str]:
        return {}

    @property
    def parallel_starts(self) -> int:
        return max(1, len(self._usable_hosts())) * parallel_starts_per_host()

    @property
    def can_resize(self) -> bool:
        return True

    @property
    def max_outage_s(self) -> float:
        return 0.0

    @property
    def capacity(self) -> int:
        """Maximum number of sandboxes now. A usable engine counts with its `max_sandboxes`. A lost
        engine counts with its sandboxes that are not removed yet, without the starts that were
        given up."""
        return sum(
            host.sandbox_count - host.discarded_start_count if host.failure else host.max_sandboxes
            for host in self.hosts
        )

    def stats(self) -> Sequence[HostStats]:
        """Return the state of each engine."""
        return [host.stats for host in self.hosts]

    async def open(self, admit: Admit | None = None) -> None:
        """Connect to the engines. Each time that an engine begins to answer, it gets sandboxes only
        after `admit` has returned for it. Raises SandboxStartError if no engine can be used."""
        if self._opening is None:
            self._admit = admit
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)
        if not self._usable_hosts():
            raise SandboxStartError(self._no_usable_engine_text())

    async def _open(self) -> None:
        for host in self.hosts:
            self._recover(host)
        trying = {asyncio.create_task(host.tried.wait()) for host in self.hosts}
        try:
            _, waiting = await asyncio.wait(trying, timeout=OPEN_TIMEOUT_S)
            while waiting and not self._usable_hosts():
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in trying:
                task.cancel()

    async def start(self, isolation: Isolation) -> Guest:
        await self.open()
        failures: dict[DockerHost, str] = {}
        while host := self._least_loaded(failures):
            try:
                return await host.start(isolation)
            except SandboxStartError as error:
                failures[host] = str(error)
                host.failed_start_at_s = asyncio.get_running_loop().time()
                logger.warning("no sandbox could be started at %s: %s", host.url, error)
                if host.failure is None:
                    await self._check_answer(host)
        if failures:
            raise SandboxStartError(
                _join_reasons((each.url, why) for each, why in failures.items())
            )
        if self._usable_hosts():
            raise NoCapacityError(
                "every Docker engine has its max_sandboxes", retry_after_s=FULL_RETRY_AFTER_S
            )
        raise SandboxStartError(self._no_usable_engine_text())

    @property
    def can_adopt(self) -> bool:
        return False

    async def adopt(self, reference: SandboxReference) -> Guest:
        raise cannot_adopt_error(self.name)

    async def fingerprint(self) -> str:
        """Return the distinct image ids of all engines that have been usable. An engine that does
        not answer gets no new sandboxes from now on; the last id of its image is returned. Raises
        SandboxStartError if no engine answers."""
        await self.open()
        await asyncio.gather(*(self._check_answer(host) for host in self._usable_hosts()))
        if not self._usable_hosts():
            raise SandboxStartError(self._no_usable_engine_text())
        return " ".join(dict.fromkeys(host.image for host in self.hosts if host.image))

    async def sweep(self) -> int:
        try:
            await self.open()
        except SandboxStartError as error:
            logger.warning("no leftovers can be swept: %s", error)
        found, self._swept_count = self._swept_count, 0
        backends = [host.backend for host in self._usable_hosts() if host.backend]
        return found + sum(await asyncio.gather(*(backend.sweep() for backend in backends)))

    async def check(self) -> list[Check]:
        """Return one check for each engine."""
        return [
            Check(f"docker engine {host.url}", host.failure is None, host.failure or "it answers")
            for host in self.hosts
        ]

    async def aclose(self) -> None:
        tasks = list(self._recovery_tasks.values())
        tasks += [self._opening] if self._opening else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(host.aclose() for host in self.hosts))

    def _usable_hosts(self) -> list[DockerHost]:
        return [host for host in self.hosts if host.failure is None]

    def _no_usable_engine_text(self) -> str:
        reasons = _join_reasons((host.url, host.failure or "") for host in self.hosts)
        return f"no Docker engine can be used: {reasons}"

    def _least_loaded(self, excluded: Iterable[DockerHost]) -> DockerHost | None:
        """Return the engine that uses the smallest share of its `max_sandboxes`. Engines without a
        failed start in the last FAILED_START_S seconds take precedence. Return None if all engines
        are excluded, full or lost."""
        found = [host for host in self.hosts if host.has_room and host not in excluded]
        since_s = asyncio.get_running_loop().time() - FAILED_START_S
        return min(
            found,
            key=lambda host: (
                host.failed_start_at_s > since_s,
                host.sandbox_count / host.max_sandboxes,
            ),
            default=None,
        )

    async def _check_answer(self, host: DockerHost) -> None:
        """Update the id of the engine's image. If the engine does not answer or has no image, give
        it no new sandboxes."""
        assert host.backend
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                host.image = await host.backend.fingerprint()
        except SandboxStartError as error:
            self._mark_lost(host, str(error))
        except TimeoutError:
            self._mark_lost(host, f"no answer within {self._answer_timeout_s:g} s")

    def _mark_lost(self, host: DockerHost, why: str) -> None:
        if host.failure is None:
            host.failure = why
            host.lost.set()
            logger.warning("%s gets no new sandboxes until it answers: %s", host.url, why)
            self._recover(host, failures=1)

    def _recover(self, host: DockerHost, failures: int = 0) -> None:
        task = asyncio.create_task(self._try_until_usable(host, failures))
        self._recovery_tasks[host] = task

    async def _try_until_usable(self, host: DockerHost, failures: int) -> None:
        """Try the engine until it can be used, with a pause after each of its failures."""
        while True:
            if failures:
                await self._clock.sleep(start_backoff_s(failures))
            try:
                async with asyncio.timeout(USE_TIMEOUT_S):
                    await self._make_usable(host)
            except Exception as error:  # else the engine would never be tried again
                failures += 1
                if not isinstance(error, SandboxError | OSError):
                    logger.exception("%s cannot be used", host.url)
                elif str(error) != host.failure:
                    logger.warning("%s gets no sandboxes: %s", host.url, error)
                host.failure = str(error) or type(error).__name__
            host.tried.set()
            if host.failure is None:
                return

    async def _make_usable(self, host: DockerHost) -> None:
        """Check the engine, sweep it, and let it get sandboxes. Raises SandboxError."""
        backend = await host.open()
        if self._admit:
            await self._admit(backend)
        host.image = await backend.fingerprint()
        self._swept_count += await backend.sweep()
        if host.failure != NOT_TRIED:
            logger.info("%s gets sandboxes now", host.url)
        host.failure, host.failed_start_at_s = None, -math.inf
        host.lost.clear()


def _join_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{url}: {why}" for url, why in reasons)
