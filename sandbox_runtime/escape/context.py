"""The types of all attempts to escape from a sandbox (Probe, Attack, EscapeFinding), and
EscapeContext, which starts the sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from policies.egress import Egress
from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.egress.connection import Connection
from sandbox_runtime.egress.dialer import Connect, Endpoint, Resolve
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.egress.limits import Timeouts, TrafficQuota
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import BUSY_PING_TIMEOUT_S, PING_INTERVAL_S
from sandbox_runtime.sandbox import ExecResult, Sandbox, StreamName
from sandbox_runtime.streams import OnConnection

_ANSWER_S = 10.0
PYTHON = "exec python3 -I -S -"
NO_SUCH_COMMAND = 127
_FAULTS = ("AttributeError", "ImportError", "NameError", "SyntaxError", "TypeError", "ValueError")
"""Errors that an old or incomplete Python raises. A program that ends with one of them was not
stopped by a boundary."""
Boundary = Literal[
    "system calls",
    "namespaces",
    "sockets",
    "settings",
    "devices",
    "privileges",
    "network",
    "processes",
    "host",
    "files",
    "bombs",
    "protocol",
    "egress",
]
Verdict = Literal["held", "open", "not tried", "accepted"]


class NotTriedError(Exception):
    """An attack cannot be made here, so nothing is known about the boundary."""


class NeighbourDisturbedError(Exception):
    """An attack affected the neighbour sandbox. The boundary then counts as open, even if the
    sandbox has a kernel of its own."""


class EscapeSandbox(Sandbox, Protocol):
    """A sandbox under attack. The attack can handle the connections that its programs open."""

    async def ping(self, timeout_s: float) -> None:
        """Return when the guest agent answers. Raises SandboxLostError if it does not answer in
        time."""

    def set_connection_handler(self, on_connection: OnConnection | None) -> None:
        """Call `on_connection` for each connection that a program in the sandbox opens. If it is
        None, refuse all such connections."""


class EgressGateway(Protocol):
    """Serves connections of a sandbox: a Gateway, or a fake of it."""

    traffic: TrafficQuota

    async def serve(self, connection: Connection) -> None: ...

    async def aclose(self) -> None: ...


class MakeGateway(Protocol):
    """Makes an EgressGateway."""

    def __call__(
        self,
        egress: Egress,
        *,
        resolve: Resolve,
        connect: Connect,
        forbidden: Collection[Endpoint],
        timeouts: Timeouts,
    ) -> EgressGateway: ...


Start = Callable[[Isolation], Awaitable[EscapeSandbox]]
"""A function that starts a sandbox. Raises SandboxStartError."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An escape attempt that runs inside a sandbox."""

    name: str
    boundary: Boundary
    description: str
    """The attempt in one sentence."""
    own_kernel_holds: bool
    """True if a kernel of the sandbox's own (gVisor) makes the attempt harmless."""


@dataclass(frozen=True, slots=True)
class Attack:
    """An escape attempt that needs the host's side, or more than one sandbox."""

    name: str
    boundary: Boundary
    description: str
    make: Callable[["EscapeContext"], Awaitable[str | None]]
    """Makes the attempt; returns what was found open, or None if the boundary held.

    Raises NeighbourDisturbedError if another sandbox was affected, SandboxError if the attempt
    could not be made.
    """
    own_kernel_holds: bool = False
    """See `Probe.own_kernel_holds`."""
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class EscapeFinding:
    """The result of one escape attempt."""

    probe: str
    """The name of the probe or attack."""
    boundary: Boundary
    verdict: Verdict
    """held: the boundary stopped the attempt. open: it did not. accepted: open, by the design of
    the backend. not tried: the attempt could not be made, which never counts as held."""
    detail: str

    def to_check(self) -> Check:
        """Return the finding as a CheckResult of `doctor`."""
        detail = self.detail or "closed"
        shown = detail if self.verdict == "held" else f"{self.verdict.upper()}: {detail}"
        is_ok = self.verdict in ("held", "accepted")
        return Check(f"{self.boundary}: {self.probe}", is_ok, shown)


class EscapeContext:
    """Starts the sandboxes of attacks: victims, and one neighbour that no attack may affect.

    Sandboxes have this `isolation` unless an attack needs another. An attack on the disk waits
    `watch_s` seconds, in which the disk watch measures the sandbox.
    """

    def __init__(
        self,
        start: Start,
        isolation: Isolation,
        *,
        make_gateway: MakeGateway = Gateway,
        watch_s: float = 12.0,
        clock: Clock | None = None,
    ) -> None:
        self.isolation = isolation
        self.make_gateway = make_gateway
        self.watch_s = watch_s
        self._start = start
        self._clock = clock or SystemClock()
        self._neighbour: EscapeSandbox | None = None
        self._ping_task: asyncio.Task[None] | None = None
        """Keeps the neighbour alive by pings, because it may be idle during an attack."""

    async def neighbour(self) -> EscapeSandbox:
        """Return the neighbour sandbox; replace it if an attack has disturbed it. Raises
        SandboxStartError."""
        if self._neighbour and await self.disturbance():
            await self.aclose()
        if not self._neighbour:
            self._neighbour = await self._start(self.isolation)
            self._ping_task = asyncio.create_task(self._ping_until_lost(self._neighbour))
        return self._neighbour

    @asynccontextmanager
    async def victim(self, isolation: Isolation | None = None) -> AsyncIterator[EscapeSandbox]:
        """Start a sandbox to attack, with `isolation` if it is given. Raises SandboxStartError."""
        sandbox = await self._start(isolation or self.isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def disturbance(self) -> str | None:
        """Return how the neighbour sandbox is disturbed, or None if it works."""
        neighbour = self._neighbour
        if neighbour is None:
            return None
        try:
            result = await neighbour.exec("echo well", timeout_s=_ANSWER_S, shell_state="none")
        except SandboxLostError as error:
            return f"the neighbour sandbox is lost: {error}"
        if result.stdout != "well\n":
            return f"the neighbour sandbox printed {(result.stdout + result.stderr)[:80]!r}"
        return None

    async def aclose(self) -> None:
        """End the neighbour sandbox. Raises the error that ended its pings, if there was one."""
        pinging, self._ping_task = self._ping_task, None
        neighbour, self._neighbour = self._neighbour, None
        if pinging:
            pinging.cancel()
            await asyncio.wait([pinging])
        if neighbour:
            await neighbour.close()
        if pinging and not pinging.cancelled():
            pinging.result()

    async def _ping_until_lost(self, sandbox: EscapeSandbox) -> None:
        with suppress(SandboxLostError):
            while True:
                await self._clock.sleep(PING_INTERVAL_S)
                await sandbox.ping(BUSY_PING_TIMEOUT_S)


async def run_python(sandbox: Sandbox, program: str, *, timeout_s: float = 20.0) -> ExecResult:
    """Run a Python program inside a sandbox. Raises SandboxLostError and NotTriedError."""
    result = await sandbox.exec(
        PYTHON, timeout_s=timeout_s, stdin=program.encode(), shell_state="none"
    )
    last = (result.stderr.splitlines() or [""])[-1]
    if result.exit_code == NO_SUCH_COMMAND or last.startswith(_FAULTS):
        raise NotTriedError(f"python3 inside exited with {result.exit_code}: {last!r}")
    return result


@asynccontextmanager
async def running_python(
    sandbox: Sandbox, program: str, *, timeout_s: float = 30.0
) -> AsyncIterator[str]:
    """Run a Python program inside a sandbox until the block ends; yield its first output.

    Raises SandboxLostError and NotTriedError.
    """
    ready = asyncio.Event()
    printed: list[str] = []

    async def on_output(stream: StreamName, text: str) -> None:
        printed.append(text)
        ready.set()

    program_run = asyncio.create_task(
        sandbox.exec(
            PYTHON,
            timeout_s=timeout_s,
            stdin=program.encode(),
            on_output=on_output,
            shell_state="none",
        )
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((program_run, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            raise NotTriedError(f"python3 inside failed: {program_run.result().stderr[-100:]!r}")
        yield "".join(printed)
    finally:
        program_run.cancel()
        waiting.cancel()
        await asyncio.wait((program_run, waiting))
