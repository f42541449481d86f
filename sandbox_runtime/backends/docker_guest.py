"""A running container: the byte stream of its guest agent, the cause of its end, and its removal.

runsc may leave processes on this host when a container fails; `RunscProcesses` kills them.
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
from sandbox_runtime.backends.base import DataCallback, LimitEvents
from sandbox_runtime.backends.docker_container import resource_limits
from sandbox_runtime.backends.docker_engine import (
    AttachStream,
    DockerEngine,
    EngineError,
    EngineNotFoundError,
)
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

_REMOVAL_TIMEOUT_S = 3.0
_CAUSE_WAIT_S = 3.0
_EXIT_WAIT_S = 0.5
_EVENTS_WAIT_S, _EVENTS_INTERVAL_S = 0.5, 0.1
_SIGKILL_EXIT_CODE = 128 + signal.SIGKILL
_RUNSC_PROGRAMS = ("runsc", "runsc-sandbox", "runsc-gofer", "containerd-shim-runc-v2")


class DockerGuest:
    """One container. After its removal has succeeded or failed, `on_end` is called with its
    name."""

    def __init__(
        self,
        name: str,
        engine: DockerEngine,
        runtime: str | None,
        runsc: "RunscProcesses | None",
        on_end: Callable[[str], None],
    ) -> None:
        self.stream: AttachStream | None = None
        """The standard streams of the agent; None until the container is created and attached."""
        self._name = name
        self._engine = engine
        self._runtime = runtime
        self._runsc = runsc
        self._on_end = on_end
        self._cause = ""
        self._removal: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._name

    async def receive(self, on_data: DataCallback) -> None:
        assert self.stream
        await self.stream.receive(on_data)
        if self._removal is None and not self._cause:
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

    async def kill(self) -> None:
        await asyncio.shield(self._start_removal())

    def stop(self, why: str) -> None:
        """Kill the container without waiting; `diagnostics` will include the reason."""
        self._cause = self._cause or why
        self._start_removal()

    async def resize(self, isolation: Isolation) -> None:
        try:
            await self._engine.update(self._name, resource_limits(isolation, self._runtime))
        except EngineError as error:
            raise SandboxStartError(
                f"the limits of sandbox {self._name} cannot be changed: {error}"
            ) from error

    def limit_events(self) -> LimitEvents | None:
        return None  # the agent inside reads the counters of the container

    def reference(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def diagnostics(self) -> str:
        printed = self.stream.stderr_tail() if self.stream else ""
        return "\n".join(filter(None, (printed, self._cause)))

    def _start_removal(self) -> "asyncio.Task[None]":
        # One task for all callers: each waits until the container is removed.
        self._removal = self._removal or asyncio.create_task(self._end())
        return self._removal

    async def _end(self) -> None:
        if self.stream:
            self.stream.abort()  # do not wait for a peer that may not answer
        removing = asyncio.ensure_future(self._remove())
        done, _ = await asyncio.wait([removing], timeout=_REMOVAL_TIMEOUT_S)
        if not done and self._runsc:
            await asyncio.to_thread(self._runsc.kill, self._name)
        await removing

    async def _remove(self) -> None:
        try:
            await self._engine.remove(self._name)
        except EngineError as error:
            logger.warning("%s could not be removed, a sweep tries again: %s", self._name, error)
        finally:
            self._on_end(self._name)
            if self._runsc:
                await asyncio.to_thread(self._runsc.kill_and_forget, self._name)

    async def _find_cause(self) -> str:
        """Return why the stream has ended. Wait up to _CAUSE_WAIT_S for the engine, which may
        notice the end later than the proxy."""
        with anyio.move_on_after(_CAUSE_WAIT_S):
            try:
                code = await self._engine.exit_code(self._name, _EXIT_WAIT_S)
            except EngineNotFoundError:  # removed already: the agent has ended or was killed
                return await self._cause_from_events("")
            except EngineError as error:
                return f"the engine closed the connection: {self._engine.url}: {error}"
            if code is None:
                return "the engine closed the connection"
            if code != _SIGKILL_EXIT_CODE:
                return ""
            unknown = "it was killed, on the engine's host or because memory ran out"
            return await self._cause_from_events(unknown)
        return "the engine closed the connection and does not answer"

    async def _cause_from_events(self, default: str) -> str:
        """Return the cause of the container's end that the engine's events show, or `default`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _EVENTS_WAIT_S
        try:
            events = await self._engine.events(self._name, "kill", "oom")
            while not events and loop.time() < until_s:  # the engine records them with a delay
                await asyncio.sleep(_EVENTS_INTERVAL_S)
                events = await self._engine.events(self._name, "kill", "oom")
        except (EngineError, ValueError, KeyError):  # an engine without events, or with others
            return default
        if "kill" in events:
            return "its container was killed or removed from outside"
        return "memory ran out and it was killed" if "oom" in events else default


class RunscProcesses:
    """Kills processes that an installation's runsc containers have left on this host.

    If a start fails, runsc leaves its kernel and file server running, and the engine no longer
    knows them. If many processes end at once, the engine's shim may miss the end of the main
    process and keep running, and the engine waits forever. Only the container's id on their command
    lines shows to which container such processes belong. So, before a container starts, its id is
    stored in a file that has the container's name and that later owners can read."""

    def __init__(self, state_dir: Path) -> None:
        self._records = state_dir / "runsc"
        self._records.mkdir(parents=True, exist_ok=True, mode=0o700)

    def record(self, name: str, container_id: str) -> None:
        """Store the id of a container that is about to start."""
        (self._records / name).write_text(container_id, encoding="ascii")

    def kill(self, name: str) -> None:
        """Kill the processes of a container."""
        with contextlib.suppress(FileNotFoundError):
            for pid in _processes_of((self._records / name).read_text(encoding="ascii")):
                logger.warning(
                    "container %s: killed process %d, which runsc has left behind", name, pid
                )
                _kill_process(pid)

    def kill_and_forget(self, name: str) -> None:
        """Kill the processes of a removed or failed container, and forget its id."""
        self.kill(name)
        (self._records / name).unlink(missing_ok=True)

    def sweep(self, is_leftover: Callable[[str], bool]) -> None:
        """Kill the processes of all containers for whose name `is_leftover` returns True."""
        for record in self._records.iterdir():
            if is_leftover(record.name):
                self.kill_and_forget(record.name)


def _processes_of(container_id: str) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or may not be read
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            matches = any(container_id.encode() in argument for argument in arguments)
            if matches and container_id and Path(os.fsdecode(program)).name in _RUNSC_PROGRAMS:
                yield int(process.name)


def _kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        logger.warning("process %d cannot be killed: %s", pid, error)
