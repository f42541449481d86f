"""A guest that sends the bytes that a test gives it, such as those of a hostile agent."""

import asyncio
from collections import Counter
from collections.abc import Callable

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.channel import Channel
from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import (
    CREDIT,
    END,
    HELLO,
    OPEN,
    PING,
    PONG,
    VERSION,
    WINDOW,
    Decoder,
    frame,
    json_frame,
)

REPORT = {
    "exit_code": 0,
    "timed_out": False,
    "duration_s": 0.1,
    "cpu_s": 0.1,
    "peak_memory_bytes": 1,
    "stdout_bytes": 0,
    "stderr_bytes": 0,
    "stdout_omitted_lines": 0,
    "stderr_omitted_lines": 0,
    "stdout_kept_bytes": 0,
    "stderr_kept_bytes": 0,
    "oom_kills": 0,
    "pids_refused": 0,
    "reading": 0,
}


class ScriptedGuest:
    """A guest that answers every request with the bytes it was given."""

    id = "scripted"

    def __init__(self, answer: Callable[[int], bytes], hello: bytes | None = None) -> None:
        self._answer = answer
        self._output: asyncio.Queue[bytes] = asyncio.Queue()
        self._decoder = Decoder(1 << 24)
        self._output.put_nowait(
            json_frame(0, HELLO, {"version": VERSION}) if hello is None else hello
        )
        self.kinds: list[int] = []
        self.credit: Counter[int] = Counter()
        """The credit that the host has given, by stream."""
        self.writes = 0
        self._is_receiving = True
        self.pings_until_done = 0
        """Number of PINGs to answer before the first operation ends; 0: answer none."""
        self.pongs = 0
        self.killed = 0

    def send_frames(self, frames: bytes) -> None:
        """Send frames to the host."""
        self._output.put_nowait(frames)

    async def wait_delivered(self) -> None:
        """Return when the host has received all frames, or no longer receives."""
        while self._is_receiving and not self._output.empty():  # noqa: ASYNC110 - see `receive`
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    # The host reads the queue at its own pace, and no event signals an empty queue.
    async def receive(self, on_data: DataCallback) -> None:
        try:
            while data := await self._output.get():
                while on_data(data) is not None:  # it has kept some for later
                    data = b""
        finally:
            self._is_receiving = False

    async def drain(self) -> None:
        """Return at once."""

    def write_control(self, data: bytes) -> None:
        self.write(data)

    def write(self, data: bytes) -> None:
        self.writes += 1
        for stream, kind, payload in self._decoder.feed(data):
            self._note(stream, kind, payload)
            if kind == OPEN and (answer := self._answer(stream)):
                self._output.put_nowait(answer)
            elif kind == PING and self.pings_until_done:
                self._output.put_nowait(frame(0, PONG))
                if self.kinds.count(PING) == self.pings_until_done:
                    self._output.put_nowait(reporting()(1))

    def _note(self, stream: int, kind: int, payload: bytes) -> None:
        self.kinds.append(kind)
        if kind == WINDOW:
            self.credit[stream] += CREDIT.unpack(payload)[0]

    async def kill(self) -> None:
        self.killed += 1
        self._output.put_nowait(b"")

    async def resize(self, isolation: Isolation) -> None:
        raise SandboxStartError("a scripted guest has no limits")

    def limit_events(self) -> None:
        return None

    def reference(self) -> None:
        return None

    def diagnostics(self) -> str:
        return ""


async def connected(clock: Clock | None = None) -> tuple[Channel, ScriptedGuest]:
    guest = ScriptedGuest(lambda n: b"")
    channel = Channel(guest, clock=clock)
    await channel.connect(timeout_s=5)
    return channel, guest


async def deliver(channel: Channel, guest: ScriptedGuest, frames: bytes) -> str | None:
    """Send frames; return why the host has lost the sandbox by them, or None."""
    guest.send_frames(frames)
    with anyio.fail_after(20):
        await guest.wait_delivered()
    return channel.lost


async def scripted_sandbox(
    answer: Callable[[int], bytes], clock: Clock | None = None
) -> tuple[GuestSandbox, ScriptedGuest]:
    guest = ScriptedGuest(answer)
    channel = Channel(guest, clock=clock)
    await channel.connect(timeout_s=5)
    return GuestSandbox(channel), guest


def reporting(**changes: object) -> Callable[[int], bytes]:
    return lambda stream: json_frame(stream, END, {**REPORT, **changes})


def ending_with(text: bytes) -> Callable[[int], bytes]:
    return lambda stream: frame(stream, END, text)
