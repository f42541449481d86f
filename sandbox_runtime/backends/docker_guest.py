"""A running container: its agent's byte stream, the cause of its end, and its removal.

runsc leaves processes on this host when a container ends badly; `RunscProcesses` kills them.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Pressure, Take
from sandbox_runtime.backends.docker_container import limits
from sandbox_runtime.backends.docker_engine import (
    AttachStream,
    DockerEngine,
    EngineError,
    MissingError,
)
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

_REMOVAL_PATIENCE_S = 3.0
_CAUSE_WAIT_S = 3.0
_EXIT_WAIT_S = 0.5
_EVENTS_WAIT_S, _EVENTS_EVERY_S = 0.5, 0.1
_KILLED = 128 + signal.SIGKILL
_RUNSC_PROGRAMS = ("runsc", "runsc-sandbox", "runsc-gofer", "containerd-shim-runc-v2")


class DockerGuest:
    """One container. `on_end` is called when it is removed, or could not be."""

    def __init__(
        self,
        name: str,
        engine: DockerEngine,
        runtime: str | None,
        runsc: "RunscProcesses | None",
        on_end: Callable[[str], None],
    ) -> None:
        self.stream: AttachStream | None = None
        """Set once the container is made and attached to."""
        self._name = name
        self._engine = engine
        self._runtime = runtime
        self._runsc = runsc
        self._on_end = on_end
        self._cause = ""
        self._ending: asyncio.Task[bool] | None = None

    @property
    def id(self) -> str:
        return self._name

    async def listen(self, take: Take) -> None:
        assert self.stream
        await self.stream.listen(take)
        if self._ending is None and not self._cause:
            self._cause = await self._find_cause()

    async def drain(self) -> None:
        assert self.stream
        await self.stream.drain()

    def write(self, data: bytes) -> None:
        assert self.stream
        self.stream.write(data)

    def write_control(self, data: bytes) -> None:
        assert self.stream
        self.stream.write_control(data)

    async def kill(self) -> bool:
        return await asyncio.shield(self._begin_to_end())

    def stop(self, why: str) -> None:
        """Kill it without waiting; `last_words` will include the reason."""
        self._cause = self._cause or why
        self._begin_to_end()

    async def limit(self, isolation: Isolation) -> None:
        try:
            await self._engine.update(self._name, limits(isolation, self._runtime))
        except EngineError as error:
            raise SandboxStartError(
                f"the limits of sandbox {self._name} cannot be changed: {error}"
            ) from error

    def pressure(self) -> Pressure | None:
        return None  # the container shows its own counters inside

    def last_words(self) -> str:
        printed = self.stream.last_words() if self.stream else ""
        return "\n".join(filter(None, (printed, self._cause)))

    def _begin_to_end(self) -> "asyncio.Task[bool]":
        # One task for all who call: each returns when the container is gone, cancelled or not.
        self._ending = self._ending or asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> bool:
        if self.stream:
            self.stream.abort()  # nothing is worth waiting for a peer that may be gone
        removing = asyncio.ensure_future(self._remove())
        done, _ = await asyncio.wait([removing], timeout=_REMOVAL_PATIENCE_S)
        if not done and self._runsc:
            await asyncio.to_thread(self._runsc.kill, self._name)
        return await removing

    async def _remove(self) -> bool:
        try:
            await self._engine.remove(self._name)
        except EngineError as error:
            logger.warning("%s could not be removed, a sweep will: %s", self._name, error)
            return False
        finally:
            self._on_end(self._name)
            if self._runsc:
                await asyncio.to_thread(self._runsc.end, self._name)
        return True

    async def _find_cause(self) -> str:
        """Return why the stream has ended, of which the engine may hear a little later than we."""
        with anyio.move_on_after(_CAUSE_WAIT_S):
            try:
                code = await self._engine.exit_code(self._name, _EXIT_WAIT_S)
            except MissingError:  # it is removed already: the agent has ended, or was killed
                return await self._killed_by("")
            except EngineError as error:
                return f"the engine closed the connection: {error}"
            if code is None:
                return "the engine closed the connection"
            if code != _KILLED:
                return ""
            unknown = "it was killed, on the engine's host or because memory ran out"
            return await self._killed_by(unknown)
        return "the engine closed the connection and does not answer"

    async def _killed_by(self, unknown: str) -> str:
        """Return who killed the container, from the engine's events, or else `unknown`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _EVENTS_WAIT_S
        try:
            events = await self._engine.events(self._name, "kill", "oom")
            while not events and loop.time() < until_s:  # it hears of them later than we do
                await asyncio.sleep(_EVENTS_EVERY_S)
                events = await self._engine.events(self._name, "kill", "oom")
        except (EngineError, ValueError, KeyError):  # an engine that keeps none, or others
            return unknown
        if "kill" in events:
            return "its container was killed or removed from outside"
        return "memory ran out and it was killed" if "oom" in events else unknown


class RunscProcesses:
    """The processes on this host of an installation's runsc containers.

    runsc leaves its kernel and file server running when a start fails, and the engine's shim when
    so many processes end at once that it misses the end that matters. The engine has forgotten the
    former and waits for the latter for good; only the container's id on their command lines tells
    whose they are. So the ids are written to a directory before a container starts, for later
    owners too: one file a container, with its name.
    """

    def __init__(self, state_dir: Path) -> None:
        self._notes = state_dir / "runsc"
        self._notes.mkdir(parents=True, exist_ok=True, mode=0o700)

    def note(self, name: str, container_id: str) -> None:
        """Write down the id of a container that is about to start."""
        (self._notes / name).write_text(container_id, encoding="ascii")

    def kill(self, name: str) -> None:
        """Kill all that runs for a container."""
        with contextlib.suppress(FileNotFoundError):
            for pid in _processes_of((self._notes / name).read_text(encoding="ascii")):
                logger.warning("container %s: runsc has left process %d, killed", name, pid)
                _kill(pid)

    def end(self, name: str) -> None:
        """Kill what a removed container, or one that was never made, left running."""
        self.kill(name)
        (self._notes / name).unlink(missing_ok=True)

    def sweep(self, is_leftover: Callable[[str], bool]) -> None:
        """End what the containers named by `is_leftover` left running."""
        for note in self._notes.iterdir():
            if is_leftover(note.name):
                self.end(note.name)


def _processes_of(container_id: str) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to see
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            told = any(container_id.encode() in argument for argument in arguments)
            if told and container_id and Path(os.fsdecode(program)).name in _RUNSC_PROGRAMS:
                yield int(process.name)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        logger.warning("process %d cannot be killed: %s", pid, error)
