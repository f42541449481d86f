"""A fake sandbox backend. A test decides when its guests start, greet, answer pings and end.

The guests speak real frames, and every command ends at once with exit code 0.
"""

import asyncio
from collections.abc import Callable

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check, DataCallback, LimitEvents
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.protocol import (
    END,
    HELLO,
    OPEN,
    PING,
    PONG,
    VERSION,
    Decoder,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import SandboxReference

REPORTED = (
    *("exit_code", "duration_s", "cpu_s", "peak_memory_bytes", "stdout_bytes", "stderr_bytes"),
    *("stdout_omitted_lines", "stderr_omitted_lines", "stdout_kept_bytes", "stderr_kept_bytes"),
    *("oom_kills", "pids_refused", "reading"),
)
"""The figures in the report of every command."""
REPORT = {**dict.fromkeys(REPORTED, 0), "stderr": ""}


def opened() -> asyncio.Event:
    """Return an event that is set."""
    gate = asyncio.Event()
    gate.set()
    return gate


class FakeGuest:
    """A guest agent in memory."""

    def __init__(self, backend: "FakeSandboxBackend", isolation: Isolation) -> None:
        self.id = f"fake-{len(backend.guests) + 1}"
        self.made = isolation
        self.limited: list[Isolation] = []
        self.pings = 0
        self.answers = True
        self._unanswered = 0
        self._backend = backend
        self._decoder = Decoder(1 << 24)
        self._output: asyncio.Queue[bytes] = asyncio.Queue()
        if backend.greets:
            self._output.put_nowait(json_frame(0, HELLO, {"version": VERSION, "agent": "fake"}))

    async def receive(self, on_data: DataCallback) -> None:
        while data := await self._output.get():
            while on_data(data) is not None:  # it has kept some for later
                data = b""

    def write(self, data: bytes) -> None:
        for stream, kind, _ in self._decoder.feed(data):
            if kind == PING:
                self.pings += 1
                self._unanswered += 1
                if self.answers:
                    self.answer()
            elif kind == OPEN:
                self._output.put_nowait(json_frame(stream, END, REPORT))

    def answer(self) -> None:
        """Answer the pings received so far, and all later ones."""
        self.answers = True
        self._output.put_nowait(frame(0, PONG) * self._unanswered)
        self._unanswered = 0

    async def drain(self) -> None:
        await self._backend.pause()
        if self._backend.input_is_closed or self not in self._backend.alive:
            raise BrokenPipeError("its input is closed")

    def write_control(self, data: bytes) -> None:
        self.write(data)

    async def resize(self, isolation: Isolation) -> None:
        await self._backend.pause()
        if self._backend.limits_are_fixed:
            raise SandboxStartError("limits cannot be changed here")
        self.limited.append(isolation)

    def die(self) -> None:
        """End without being killed."""
        self._backend.alive.discard(self)
        self._output.put_nowait(b"")

    async def kill(self) -> None:
        await self._backend.pause()
        await self._backend.may_end.wait()
        self.die()

    def limit_events(self) -> LimitEvents | None:
        return None

    def reference(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def diagnostics(self) -> str:
        return ""


class FakeSandboxBackend:
    """A backend that starts fake guests. `turns` returns the number of loop turns of each wait."""

    def __init__(self, turns: Callable[[], int] = lambda: 0) -> None:
        self.image = "image-1"
        self.refusal: str | None = None
        """The error message of every start; None if starts succeed."""
        self.adoption_refusal: str | None = None
        """The error message of every adoption; None if adoptions succeed."""
        self.checks: list[Check] = []
        """The results of its checks."""
        self.closed = False
        self.greets = True
        self.limits_are_fixed = False
        self.input_is_closed = False
        """True if writes to the guests fail."""
        self.parallel_starts = 4
        self.may_start = opened()
        self.may_end = opened()
        self.may_adopt = opened()
        self.on_start: Callable[[], None] = lambda: None
        self.guests: list[FakeGuest] = []
        self.alive: set[FakeGuest] = set()
        self.asked = 0
        self.adoptions = 0
        self.starting = 0
        self.most_starting = 0
        self.most_alive = 0
        self._turns = turns

    @property
    def name(self) -> str:
        return "fake"

    @property
    def accepted_escapes(self) -> dict[str, str]:
        return {}

    @property
    def capacity(self) -> None:
        return None

    @property
    def can_resize(self) -> bool:
        return True

    @property
    def max_outage_s(self) -> float:
        return 0.0

    async def start(self, isolation: Isolation) -> FakeGuest:
        self.on_start()
        self.asked += 1
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            return await self._start(isolation)
        finally:
            self.starting -= 1

    async def _start(self, isolation: Isolation) -> FakeGuest:
        await self.pause()
        await self.may_start.wait()
        if self.refusal is not None:
            raise SandboxStartError(self.refusal)
        guest = FakeGuest(self, isolation)
        self.guests.append(guest)
        self.alive.add(guest)
        self.most_alive = max(self.most_alive, len(self.alive))
        try:
            await self.pause()
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await guest.kill()
            raise
        return guest

    @property
    def can_adopt(self) -> bool:
        return True

    async def adopt(self, reference: SandboxReference) -> FakeGuest:
        self.adoptions += 1
        await self.may_adopt.wait()
        if self.adoption_refusal is not None:
            raise SandboxStartError(self.adoption_refusal)
        guest = FakeGuest(self, reference["isolation"])
        self.guests.append(guest)
        self.alive.add(guest)
        return guest

    async def fingerprint(self) -> str:
        await self.pause()
        if self.refusal is not None:
            raise SandboxStartError(self.refusal)
        return self.image

    async def pause(self) -> None:
        """Wait for some loop turns, in place of the work of a real backend."""
        for _ in range(self._turns()):
            await asyncio.sleep(0)

    async def sweep(self) -> int:
        return 0

    async def check(self) -> list[Check]:
        return self.checks

    async def aclose(self) -> None:
        self.closed = True
