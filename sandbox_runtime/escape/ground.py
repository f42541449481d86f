"""Where attacks take place: sandboxes to break, and one beside them that must not notice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from policies.egress import Egress
from policies.isolation import Isolation
from sandbox_runtime.egress.connection import Connection
from sandbox_runtime.egress.dialer import Connect, Endpoint, Resolve
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.egress.limits import Timeouts
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.sandbox import ExecResult, Sandbox, StreamName
from sandbox_runtime.streams import OnConnection

_ANSWER_S = 10.0
_PYTHON = "exec python3 -I -S -"
NO_SUCH_COMMAND = 127
_FAULTS = ("AttributeError", "ImportError", "NameError", "SyntaxError", "TypeError", "ValueError")
"""What an old or a small Python says to a program: no wall has stopped that."""


class NotTriedError(Exception):
    """An attack cannot be made here, and says nothing about a wall."""


class DisturbedError(Exception):
    """The sandbox beside an attack felt it, which no kernel of its own excuses."""


class Computer(Sandbox, Protocol):
    """A sandbox of which its owner decides what it may reach."""

    def let_out(self, on_connection: OnConnection | None) -> None:
        """Decide what becomes of connections that programs inside open; None refuses them."""


class WayOut(Protocol):
    """What decides on connections: a Gateway."""

    async def serve(self, connection: Connection) -> None: ...

    async def aclose(self) -> None: ...


class MakeWayOut(Protocol):
    """How one is made."""

    def __call__(
        self,
        egress: Egress,
        *,
        resolve: Resolve,
        connect: Connect,
        forbidden: Collection[Endpoint],
        timeouts: Timeouts,
    ) -> WayOut: ...


Start = Callable[[Isolation], Awaitable[Computer]]
"""Start a sandbox. Raises SandboxStartError."""


class Ground:
    """Sandboxes as `start` makes them, with this isolation where an attack needs no other.

    Whoever watches disks is given `watch_s` to see what was written.
    """

    def __init__(
        self,
        start: Start,
        isolation: Isolation,
        *,
        make_way_out: MakeWayOut = Gateway,
        watch_s: float = 12.0,
    ) -> None:
        self.isolation = isolation
        self.make_way_out = make_way_out
        self.watch_s = watch_s
        self._start = start
        self._neighbour: Computer | None = None

    async def neighbour(self) -> Computer:
        """The one that nothing is to happen to. Raises SandboxStartError."""
        if self._neighbour and await self.disturbed():
            await self.aclose()  # for a reason of its own: nothing happens to it now
        self._neighbour = self._neighbour or await self._start(self.isolation)
        return self._neighbour

    @asynccontextmanager
    async def victim(self, isolation: Isolation | None = None) -> AsyncIterator[Computer]:
        """One to be broken, with another isolation if it is given. Raises SandboxStartError."""
        sandbox = await self._start(isolation or self.isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def disturbed(self) -> str | None:
        """What has happened to the neighbour, if anything."""
        neighbour = self._neighbour
        if neighbour is None:
            return None
        try:
            result = await neighbour.exec("echo well", timeout_s=_ANSWER_S, shell_state="none")
        except SandboxLostError as error:
            return f"the sandbox beside it is lost: {error}"
        if result.stdout != "well\n":
            return f"the sandbox beside it says {(result.stdout + result.stderr)[:80]!r}"
        return None

    async def aclose(self) -> None:
        """End the neighbour."""
        if self._neighbour:
            await self._neighbour.close()
            self._neighbour = None


async def python(sandbox: Sandbox, program: str, *, timeout_s: float = 20.0) -> ExecResult:
    """Run a Python program inside. Raises SandboxLostError and NotTriedError."""
    result = await sandbox.exec(
        _PYTHON, timeout_s=timeout_s, stdin=program.encode(), shell_state="none"
    )
    last = (result.stderr.splitlines() or [""])[-1]
    if result.exit_code == NO_SUCH_COMMAND or last.startswith(_FAULTS):
        raise NotTriedError(f"python3 inside ended with {result.exit_code} and said {last!r}")
    return result


@asynccontextmanager
async def running(sandbox: Sandbox, program: str, *, timeout_s: float = 30.0) -> AsyncIterator[str]:
    """A Python program that has said something, which is given, and goes on until the block ends.

    Raises SandboxLostError and NotTriedError.
    """
    ready = asyncio.Event()
    said: list[str] = []

    async def heard(stream: StreamName, text: str) -> None:
        said.append(text)
        ready.set()

    going_on = asyncio.create_task(
        sandbox.exec(
            _PYTHON,
            timeout_s=timeout_s,
            stdin=program.encode(),
            on_output=heard,
            shell_state="none",
        )
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((going_on, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            raise NotTriedError(f"python3 inside said {going_on.result().stderr[-100:]!r}")
        yield "".join(said)
    finally:
        going_on.cancel()
        waiting.cancel()
        await asyncio.wait((going_on, waiting))
