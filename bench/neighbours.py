"""Measures how much a sandbox that uses up a resource slows down the commands of another sandbox
and `/health`, and how much extreme request bodies slow down `/health`.

For each bomb, the proxy handles two requests. In the first, the model runs the bomb; in the second,
called the neighbour, the model runs short commands. The model is served by this process, which
times the commands. On a host with no more cores than a sandbox may use, the figures include this
process's own wait for a core.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from bench.bombs import BOMBS
from bench.instant_model import SUBMIT_CALL, call_completion, json_response, serve
from bench.load import get_body, post_request
from bench.plan import Plan, show_progress
from bench.runs import wait_until_settled
from bench.servers import BenchServer, free_port, run_instant_model, run_proxy
from bench.table import Row, TablePart

BACKENDS: Mapping[str, tuple[str, str | None]] = {
    "docker, runc": ("docker", "runc"),
    "docker, runsc": ("docker", "runsc"),
    "bubblewrap": ("bubblewrap", None),
}
"""The backends under test by name: the kind, and the runtime of the engine or None."""
ISOLATION = {"memory_mib": 512, "disk_mib": 256, "pids": 256}
"""Lower limits than the default, so that a bomb reaches them within seconds."""
IDLE = "idle"
NEIGHBOUR = "neighbour"
MEASURED_S = 3.0
"""Time during which the neighbour runs commands beside a bomb, in seconds."""
BOMB_DELAY_S = 0.5
"""Pause between sending the command of a bomb and measuring, in seconds."""
MAX_COMMANDS = 90
"""Maximum number of the neighbour's commands. It is below the limit of 100 turns in a run."""
TIMEOUT_S = 60.0
"""Timeout of the neighbour's run, and of the wait until earlier sandboxes are gone, in seconds."""
PAUSE_S = 0.01
"""Pause between two `/health` requests, in seconds."""
_MESSAGES_START = b'{"model": "bench", "messages": ['
_PICTURE_START = (
    b'{"model": "bench:plain", "messages": [{"role": "user", "content": [{"type": "image_url",'
    b' "image_url": {"url": "data:image/png;base64,'
)
BODIES: Mapping[str, tuple[bytes, bytes, int, bytes]] = {
    "60 MB of `{},`": (_MESSAGES_START, b"{},", 20_000_000, b""),
    "8 MiB of `{}`": (_MESSAGES_START, b"{}", 4 << 20, b""),
    "8 MiB of quotes in a string": (_MESSAGES_START + b'{"role": "', b'\\"', 4 << 20, b""),
    "a picture of 60 MB": (_PICTURE_START, b"QUJD", 15_000_000, b'"}}]}]}'),
}
"""The request bodies by name, each as its start, a piece, the number of repetitions of the piece,
and its end."""
POSTS_PER_BODY = 5
"""Number of requests for each body."""
PIECE_BYTES = 1 << 16
MAX_STALL_MS = 100


class BombModel:
    """A model that runs the bomb named in the request, or runs commands and times them."""

    def __init__(self) -> None:
        self.commands_ms: list[float] = []
        """Durations of the neighbour's commands."""
        self.ends_at = 0.0
        """Time at which the neighbour stops."""
        self.bomb_is_sent = asyncio.Event()
        """An event that is set when the command of the bomb is sent."""
        self._command_sent_at: float | None = None

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Reply with the next command, or with the answer."""
        name = body["model"]
        if name != NEIGHBOUR:
            writer.write(json_response(call_completion("execute_bash", {"command": BOMBS[name]})))
            self.bomb_is_sent.set()
            return
        self.record_duration()
        if time.perf_counter() >= self.ends_at or len(self.commands_ms) >= MAX_COMMANDS:
            writer.write(json_response(call_completion(*SUBMIT_CALL)))
            return
        await asyncio.sleep(MEASURED_S / MAX_COMMANDS)
        command = f"true {len(self.commands_ms)}"
        writer.write(json_response(call_completion("execute_bash", {"command": command})))
        self._command_sent_at = time.perf_counter()

    def start_measuring(self) -> None:
        """Discard the measurements so far, and let the neighbour run for MEASURED_S from now."""
        self.commands_ms = []
        self.ends_at = time.perf_counter() + MEASURED_S

    def record_duration(self) -> None:
        """Record the duration of the last command, or of the current one so far."""
        if self._command_sent_at is not None:
            self.commands_ms.append((time.perf_counter() - self._command_sent_at) * 1000)
            self._command_sent_at = None


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend with every bomb, then the request bodies."""
    parts, missing = [], []
    for name in BACKENDS:
        try:
            async with _run_server(plan, name) as (server, model):
                parts += await _measure_backend(name, server, model)
        except RuntimeError as error:
            missing.append(Row(name, note=str(error).splitlines()[-1]))
    missed = [TablePart("neighbours: left out", missing)] if missing else []
    return [*parts, *missed, await _measure_bodies(plan)]


@asynccontextmanager
async def _run_server(plan: Plan, name: str) -> AsyncIterator[tuple[BenchServer, BombModel]]:
    """Run the proxy with the backend `name`, and a model. Raises RuntimeError if the proxy does not
    start."""
    model, port = BombModel(), free_port()
    backend, runtime = BACKENDS[name]
    listening = await asyncio.start_server(partial(serve, model.answer), "127.0.0.1", port)
    async with (
        listening,
        run_proxy(
            BenchServer(os.getpid(), port, 0),
            sandbox=backend,
            image=plan.image,
            runtime=runtime,
            isolation=ISOLATION,
        ) as server,
    ):
        yield server, model


async def _measure_backend(name: str, server: BenchServer, model: BombModel) -> list[TablePart]:
    commands: list[Row] = []
    health: list[Row] = []
    for bomb in (IDLE, *BOMBS):
        show_progress(f"neighbours: {name}, {bomb}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await wait_until_settled(server)
        except TimeoutError:
            commands.append(
                Row(bomb, note=f"the sandboxes before it are there after {TIMEOUT_S} s")
            )
            break
        took = await _measure_during_bomb(server, model, bomb)
        for rows, samples in zip((commands, health), took, strict=True):
            rows.append(Row(bomb, samples, peers=(IDLE,) if rows else ()))
    show_progress("")
    return [
        TablePart(f"neighbours, {name}: a command beside a bomb of", commands),
        TablePart(f"neighbours, {name}: /health beside a bomb of", health),
    ]


async def _measure_during_bomb(
    server: BenchServer, model: BombModel, bomb: str
) -> tuple[Sequence[float], list[float]]:
    """Return the durations in ms of the neighbour's commands and of `/health` requests during
    `bomb`.
    """
    if bomb == IDLE:
        return await _measure_neighbour(server, model)
    model.bomb_is_sent.clear()
    async with _open_request(server, bomb):
        await model.bomb_is_sent.wait()
        await asyncio.sleep(BOMB_DELAY_S)
        return await _measure_neighbour(server, model)


async def _measure_neighbour(
    server: BenchServer, model: BombModel
) -> tuple[Sequence[float], list[float]]:
    model.start_measuring()
    async with _watch_health(server) as health, _open_request(server, NEIGHBOUR) as answer:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await answer.readuntil(b"\r\n\r\n")
        except TimeoutError:
            model.record_duration()
    return model.commands_ms, health


@asynccontextmanager
async def _open_request(server: BenchServer, name: str) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request to a model. Cancel the request if it is unanswered at the end of the block."""
    question = {"model": name, "messages": [{"role": "user", "content": f"{time.time_ns()}"}]}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post_request("/v1/chat/completions", question, "none"))
    try:
        yield reader
    finally:
        writer.close()


@asynccontextmanager
async def _watch_health(server: BenchServer) -> AsyncIterator[list[float]]:
    """Yield a list that collects the latency of each `/health` request during the block."""
    health: list[float] = []
    watching = asyncio.create_task(_poll_health(server, health))
    try:
        yield health
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _poll_health(server: BenchServer, health: list[float]) -> None:
    while True:
        began = time.perf_counter()
        try:
            await get_body(server.port, "/health")
        finally:
            health.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_S)


async def _measure_bodies(plan: Plan) -> TablePart:
    # The model runs in its own process, so that its decoding of an image delays nothing here.
    async with (
        run_instant_model() as model,
        run_proxy(model, sandbox="bubblewrap", image=plan.image) as server,
    ):
        rows = [row async for row in _stall_rows(server)]
    show_progress("")
    return TablePart("bodies: the longest wait for /health while one is posted", rows)


async def _stall_rows(server: BenchServer) -> AsyncIterator[Row]:
    for name, (begin, repeated, times, end) in BODIES.items():
        body, worst, status = begin + repeated * times + end, [], ""
        for number in range(POSTS_PER_BODY):
            show_progress(f"neighbours: bodies, {name}, {number}")
            async with _watch_health(server) as health:
                status = await _post_body(server, body)
            worst.append(max(health))
        yield Row(name, worst, "ms", MAX_STALL_MS, note=f"answered {status}")


async def _post_body(server: BenchServer, body: bytes) -> str:
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
