"""Simulated sandboxes of a cluster. Starts, removals and round trips take as long as with Pods. The
guests speak the real protocol but run nothing."""

import asyncio
import json
from collections.abc import Mapping
from itertools import count

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check, DataCallback, LimitEvents, cannot_adopt_error
from sandbox_runtime.backends.kubernetes import PARALLEL_STARTS
from sandbox_runtime.protocol import (
    DATA,
    END,
    EOF,
    HELLO,
    MAX_OPEN_BYTES,
    OPEN,
    PING,
    PONG,
    VERSION,
    Decoder,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import SandboxReference

START_S, END_S = 2.6, 1.0
"""Duration of the start and of the removal of a Pod, in seconds. An earlier run of `python -m bench
pods` measured them; later ones measured less."""
ROUND_TRIP_S = 0.0046
"""Duration of an operation in a Pod without the operation's own work, in seconds; from the same
run."""
OUTPUT = b"42\n"
"""The output of every command."""
_ZEROS = (
    *("cpu_s", "peak_memory_bytes", "oom_kills", "pids_refused", "stderr_bytes", "reading"),
    *("stdout_omitted_lines", "stdout_kept_bytes", "stderr_omitted_lines", "stderr_kept_bytes"),
)
COMMAND_REPORT = {
    **dict.fromkeys(_ZEROS, 0),
    "exit_code": 0,
    "timed_out": False,
    "running": False,
    "waiting": False,
    "stdout_bytes": len(OUTPUT),
}


class SimulatedGuest:
    """A guest agent without a sandbox. Every command prints `OUTPUT` after `command_s` seconds."""

    def __init__(self, guest_id: str, command_s: float) -> None:
        self.id = guest_id
        self._command_s = command_s
        self._decoder = Decoder(MAX_OPEN_BYTES)
        self._output: asyncio.Queue[bytes] = asyncio.Queue()
        self._bytes_put: dict[int, int] = {}
        """Number of bytes that the host has sent so far, by the stream of the file."""
        self._output.put_nowait(json_frame(0, HELLO, {"version": VERSION, "agent": "simulated"}))

    async def receive(self, on_data: DataCallback) -> None:
        while data := await self._output.get():
            while (pause_s := on_data(data)) is not None:
                await asyncio.sleep(pause_s)
                data = b""

    async def drain(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        for stream, kind, payload in self._decoder.feed(data):
            if kind == PING:
                self._output.put_nowait(frame(0, PONG))
            elif kind == OPEN:
                self._begin(stream, json.loads(payload))
            elif kind == DATA:
                self._bytes_put[stream] = self._bytes_put.get(stream, 0) + len(payload)
            elif kind == EOF:
                self._answer(stream, {"bytes": self._bytes_put.pop(stream, 0)})

    def write_control(self, data: bytes) -> None:
        self.write(data)

    async def kill(self) -> None:
        await asyncio.sleep(END_S)
        self._output.put_nowait(b"")

    async def resize(self, isolation: Isolation) -> None:
        pass

    def limit_events(self) -> LimitEvents | None:
        return None

    def reference(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def diagnostics(self) -> str:
        return ""

    def _begin(self, stream: int, operation: Mapping[str, object]) -> None:
        kind = operation["op"]
        if kind in ("exec", "attach"):
            report = {**COMMAND_REPORT, "duration_s": self._command_s}
            self._answer(stream, report, after_s=self._command_s, output=OUTPUT)
        elif kind == "get":
            self._answer(stream, {"error": "missing", "message": "there are no files here"})
        elif kind == "list":
            self._answer(stream, {"truncated": False})
        elif kind == "pipe":
            self._answer(stream, {"exit_code": 0, "stderr": ""})
        elif kind == "stop":
            self._answer(stream, {})

    def _answer(
        self, stream: int, report: object, *, after_s: float = 0.0, output: bytes = b""
    ) -> None:
        frames = json_frame(stream, END, report)
        if output:
            frames = frame(stream, DATA, output) + frames
        loop = asyncio.get_running_loop()
        loop.call_later(ROUND_TRIP_S + after_s, self._output.put_nowait, frames)


class SimulatedBackend:
    """Starts simulated guests."""

    name = "simulated"
    accepted_escapes: Mapping[str, str] = {}
    capacity = None
    parallel_starts = PARALLEL_STARTS
    can_resize = False
    can_adopt = False
    max_outage_s = 0.0

    def __init__(self, command_s: float) -> None:
        """`command_s` is the duration of every command, in seconds."""
        self._command_s = command_s
        self._numbers = count(1)

    async def start(self, isolation: Isolation) -> SimulatedGuest:
        await asyncio.sleep(START_S)
        return SimulatedGuest(f"simulated-{next(self._numbers)}", self._command_s)

    async def adopt(self, reference: SandboxReference) -> SimulatedGuest:
        raise cannot_adopt_error(self.name)

    async def fingerprint(self) -> str:
        return "simulated"

    async def sweep(self) -> int:
        return 0

    async def check(self) -> list[Check]:
        return []

    async def aclose(self) -> None:
        pass
