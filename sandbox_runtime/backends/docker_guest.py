"""A guest in a container: the agent at the far end of an attachment."""

import asyncio
import logging
import signal
import time
from typing import Protocol

import anyio
import anyio.to_thread

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Pressure, Take
from sandbox_runtime.backends.docker_api import MissingError
from sandbox_runtime.backends.docker_attach import Attachment
from sandbox_runtime.backends.docker_container import limits
from sandbox_runtime.backends.docker_engine import ENGINE_ERRORS, Engine, said
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

_REMOVAL_PATIENCE_S = 3.0
_CAUSE_WAIT_S = 3.0
_EXIT_WAIT_S = 0.5
_EVENTS_WAIT_S, _EVENTS_EVERY_S = 0.5, 0.1
_KILLED = 128 + signal.SIGKILL


class Removal(Protocol):
    """What is to be done about a container's end beside asking the engine."""

    async def hasten(self, name: str) -> None:
        """The engine takes long to remove it."""

    async def over(self, name: str) -> None:
        """It is removed, or could not be."""


class DockerGuest:
    """One container."""

    def __init__(self, name: str, engine: Engine, runtime: str | None, removal: Removal) -> None:
        self.attachment: Attachment | None = None
        self._name = name
        self._engine = engine
        self._runtime = runtime
        self._removal = removal
        self._cause = ""
        self._ending: asyncio.Task[bool] | None = None

    @property
    def id(self) -> str:
        return self._name

    async def listen(self, take: Take) -> None:
        assert self.attachment
        await self.attachment.listen(take)
        if self._ending is None and not self._cause:
            self._cause = await self._find_cause()

    async def drain(self) -> None:
        assert self.attachment
        await self.attachment.drain()

    def write(self, data: bytes) -> None:
        assert self.attachment
        self.attachment.write(data)

    def write_control(self, data: bytes) -> None:
        assert self.attachment
        self.attachment.write_control(data)

    async def kill(self) -> bool:
        return await asyncio.shield(self._begin_to_end())

    def stop(self, why: str) -> None:
        """Kill it without waiting; `last_words` will tell why."""
        self._cause = self._cause or why
        self._begin_to_end()

    async def limit(self, isolation: Isolation) -> None:
        bounds = limits(isolation, self._runtime)
        try:
            await self._engine.update(self._name, bounds)
        except ENGINE_ERRORS as error:
            raise SandboxStartError(
                f"the limits of sandbox {self._name} cannot be changed: {said(error)}"
            ) from error

    def pressure(self) -> Pressure | None:
        return None  # the container shows its own counters inside

    def last_words(self) -> str:
        printed = self.attachment.last_words() if self.attachment else ""
        return "\n".join(filter(None, (printed, self._cause)))

    def _begin_to_end(self) -> "asyncio.Task[bool]":
        # One task for all who call: each returns when the container is gone, cancelled or not.
        self._ending = self._ending or asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> bool:
        if self.attachment:
            self.attachment.close()
        removing = asyncio.ensure_future(self._remove())
        done, _ = await asyncio.wait([removing], timeout=_REMOVAL_PATIENCE_S)
        if not done:
            await self._removal.hasten(self._name)
        return await removing

    async def _remove(self) -> bool:
        try:
            await self._engine.remove(self._name)
        except ENGINE_ERRORS as error:
            logger.warning("%s could not be removed, a sweep will: %s", self._name, said(error))
            return False
        finally:
            await self._removal.over(self._name)
        return True

    async def _find_cause(self) -> str:
        with anyio.move_on_after(_CAUSE_WAIT_S):
            return await anyio.to_thread.run_sync(self._ask_for_cause, abandon_on_cancel=True)
        return "the engine closed the connection and does not answer"

    def _ask_for_cause(self) -> str:
        """Why the stream has ended, of which the engine may hear a little later than we do."""
        try:
            code = self._engine.exit_code(self._name, _EXIT_WAIT_S)
        except MissingError:
            code = _KILLED  # perhaps: it is removed already
            unknown = ""  # the agent has ended
        except ENGINE_ERRORS as error:
            return f"the engine closed the connection: {said(error)}"
        else:
            unknown = "it was killed, on the engine's host or because memory ran out"
        if code is None:
            return "the engine closed the connection"
        return self._killed_by(unknown) if code == _KILLED else ""

    def _killed_by(self, unknown: str) -> str:
        try:
            events = self._engine.history(self._name, "kill", "oom")
            until = time.monotonic() + _EVENTS_WAIT_S
            while not events and time.monotonic() < until:  # it hears of them later than we do
                time.sleep(_EVENTS_EVERY_S)
                events = self._engine.history(self._name, "kill", "oom")
        except (*ENGINE_ERRORS, ValueError, KeyError):  # an engine that keeps none, or others
            return unknown
        if "kill" in events:
            return "its container was killed or removed from outside"
        return "memory ran out and it was killed" if "oom" in events else unknown
