"""Effect of a sandbox that uses up a resource on another sandbox's commands and on `/health`.

Also measures the effect of extreme request bodies on `/health`. The proxy handles two requests: in
one the model runs a bomb, in the other, the neighbour, short commands. The model is served by this
process, which times the commands. On a host with no more cores than a sandbox may use, the figures
include this process's own wait for a core.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from bench.bombs import BOMBS
from bench.instant_model import SUBMIT, json_response, serve, turn
from bench.load import got, post
from bench.plan import Plan, progress
from bench.runs import settled
from bench.servers import BenchServer, free_port, model_backend, proxy
from bench.table import Row, TablePart

BACKENDS: Mapping[str, tuple[str, str | None]] = {
    "docker, runc": ("docker", "runc"),
    "docker, runsc": ("docker", "runsc"),
    "bubblewrap": ("bubblewrap", None),
}
"""The backend and the engine's runtime, by name."""
ISOLATION = {"memory_mib": 512, "disk_mib": 256, "pids": 256}
"""Lower limits than the default, so that a bomb reaches them within seconds."""
IDLE = "idle"
NEIGHBOUR = "neighbour"
SECONDS = 3.0
"""Time during which the neighbour runs commands beside a bomb, in seconds."""
BEGIN_S = 0.5
"""Pause between sending the command of a bomb and measuring, in seconds."""
COMMANDS = 90
"""Maximum number of the neighbour's commands. It is below the limit of 100 turns in a run."""
LONGEST_S = 60.0
"""Timeout of the neighbour's run, and of the wait until earlier sandboxes are gone, in seconds."""
PAUSE_S = 0.01
"""Pause between two `/health` requests, in seconds."""
_FIRST = b'{"model": "bench", "messages": ['
_PICTURE = (
    b'{"model": "bench:plain", "messages": [{"role": "user", "content": [{"type": "image_url",'
    b' "image_url": {"url": "data:image/png;base64,'
)
BODIES: Mapping[str, tuple[bytes, bytes, int, bytes]] = {
    "60 MB of `{},`": (_FIRST, b"{},", 20_000_000, b""),
    "8 MiB of `{}`": (_FIRST, b"{}", 4 << 20, b""),
    "8 MiB of quotes in a string": (_FIRST + b'{"role": "', b'\\"', 4 << 20, b""),
    "a picture of 60 MB": (_PICTURE, b"QUJD", 15_000_000, b'"}}]}]}'),
}
"""Each body: its start, a piece, the number of repetitions of the piece, its end."""
POSTS = 5
"""Number of requests for each body."""
PIECE_BYTES = 1 << 16
STALL_MS = 100


class SlowModel:
    """A model that runs the bomb named in the request, or runs commands and times them."""

    def __init__(self) -> None:
        self.commands_ms: list[float] = []
        """Durations of the neighbour's commands."""
        self.ends_at = 0.0
        """Time at which the neighbour stops."""
        self.bomb_is_off = asyncio.Event()
        """Set when the command of the bomb is sent."""
        self._asked_at: float | None = None

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Reply with the next command, or with the answer."""
        name = body["model"]
        if name != NEIGHBOUR:
            writer.write(json_response(turn("execute_bash", {"command": BOMBS[name]})))
            self.bomb_is_off.set()
            return
        self.note()
        if time.perf_counter() >= self.ends_at or len(self.commands_ms) >= COMMANDS:
            writer.write(json_response(turn(*SUBMIT)))
            return
        await asyncio.sleep(SECONDS / COMMANDS)
        command = f"true {len(self.commands_ms)}"
        writer.write(json_response(turn("execute_bash", {"command": command})))
        self._asked_at = time.perf_counter()

    def begin(self) -> None:
        """Discard the measurements so far, and let the neighbour run for SECONDS from now."""
        self.commands_ms = []
        self.ends_at = time.perf_counter() + SECONDS

    def note(self) -> None:
        """Record the duration of the last command, or of the current one so far."""
        if self._asked_at is not None:
            self.commands_ms.append((time.perf_counter() - self._asked_at) * 1000)
            self._asked_at = None


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend with every bomb, then the request bodies."""
    parts, missing = [], []
    for name in BACKENDS:
        try:
            async with _serving(plan, name) as (server, model):
                parts += await _backend(name, server, model)
        except RuntimeError as error:
            missing.append(Row(name, note=str(error).splitlines()[-1]))
    missed = [TablePart("neighbours: left out", missing)] if missing else []
    return [*parts, *missed, await _bodies(plan)]


@asynccontextmanager
async def _serving(plan: Plan, name: str) -> AsyncIterator[tuple[BenchServer, SlowModel]]:
    """Run the proxy with the backend `name`, and a model. Raise RuntimeError if the proxy fails."""
    model, port = SlowModel(), free_port()
    backend, runtime = BACKENDS[name]
    listening = await asyncio.start_server(partial(serve, model.answer), "127.0.0.1", port)
    async with (
        listening,
        proxy(
            BenchServer(os.getpid(), port, 0),
            sandbox=backend,
            image=plan.image,
            runtime=runtime,
            isolation=ISOLATION,
        ) as server,
    ):
        yield server, model


async def _backend(name: str, server: BenchServer, model: SlowModel) -> list[TablePart]:
    commands: list[Row] = []
    health: list[Row] = []
    for bomb in (IDLE, *BOMBS):
        progress(f"neighbours: {name}, {bomb}")
        try:
            async with asyncio.timeout(LONGEST_S):
                await settled(server)
        except TimeoutError:
            commands.append(
                Row(bomb, note=f"the sandboxes before it are there after {LONGEST_S} s")
            )
            break
        took = await _beside(server, model, bomb)
        for rows, samples in zip((commands, health), took, strict=True):
            rows.append(Row(bomb, samples, peers=(IDLE,) if rows else ()))
    progress("")
    return [
        TablePart(f"neighbours, {name}: a command beside a bomb of", commands),
        TablePart(f"neighbours, {name}: /health beside a bomb of", health),
    ]


async def _beside(
    server: BenchServer, model: SlowModel, bomb: str
) -> tuple[Sequence[float], list[float]]:
    """Return the durations in ms of the neighbour's commands and of `/health` requests during
    `bomb`.
    """
    if bomb == IDLE:
        return await _neighbour(server, model)
    model.bomb_is_off.clear()
    async with _asked(server, bomb):
        await model.bomb_is_off.wait()
        await asyncio.sleep(BEGIN_S)
        return await _neighbour(server, model)


async def _neighbour(server: BenchServer, model: SlowModel) -> tuple[Sequence[float], list[float]]:
    model.begin()
    async with _watched(server) as health, _asked(server, NEIGHBOUR) as answer:
        try:
            async with asyncio.timeout(LONGEST_S):
                await answer.readuntil(b"\r\n\r\n")
        except TimeoutError:
            model.note()
    return model.commands_ms, health


@asynccontextmanager
async def _asked(server: BenchServer, name: str) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request to a model. Cancel the request if it is unanswered at the end of the block."""
    question = {"model": name, "messages": [{"role": "user", "content": f"{time.time_ns()}"}]}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post("/v1/chat/completions", question, "none"))
    try:
        yield reader
    finally:
        writer.close()


@asynccontextmanager
async def _watched(server: BenchServer) -> AsyncIterator[list[float]]:
    """Yield a list that collects the latency of each `/health` request during the block."""
    health: list[float] = []
    watching = asyncio.create_task(_watch(server, health))
    try:
        yield health
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(server: BenchServer, health: list[float]) -> None:
    while True:
        began = time.perf_counter()
        try:
            await got(server.port, "/health")
        finally:
            health.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_S)


async def _bodies(plan: Plan) -> TablePart:
    # The model runs in its own process, so that its decoding of an image delays nothing here.
    async with (
        model_backend() as model,
        proxy(model, sandbox="bubblewrap", image=plan.image) as server,
    ):
        rows = [row async for row in _stalls(server)]
    progress("")
    return TablePart("bodies: the longest wait for /health while one is posted", rows)


async def _stalls(server: BenchServer) -> AsyncIterator[Row]:
    for name, (begin, repeated, times, end) in BODIES.items():
        body, worst, status = begin + repeated * times + end, [], ""
        for number in range(POSTS):
            progress(f"neighbours: bodies, {name}, {number}")
            async with _watched(server) as health:
                status = await _posted(server, body)
            worst.append(max(health))
        yield Row(name, worst, "ms", STALL_MS, note=f"answered {status}")


async def _posted(server: BenchServer, body: bytes) -> str:
    """Send the body and return the status of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), PIECE_BYTES):
        writer.write(body[start : start + PIECE_BYTES])
        await writer.drain()
        await asyncio.sleep(0)  # `drain` alone lets nothing else run, such as the watch
    try:
        return (await reader.readline()).split()[1].decode()
    finally:
        writer.close()
