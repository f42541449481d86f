"""Clients that disconnect at any time leave nothing behind."""

import asyncio
import json
import os
import random
import socket
import struct
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from docker.constants import DEFAULT_MAX_POOL_SIZE, DEFAULT_NUM_POOLS

from proxy.models.scripted import call, text_reply, tool_reply
from tests.e2e.leftovers import Engine, cgroups_of, gone, open_files, tasks
from tests.fakes.backend import Frames, Held, Item, chunk, frames, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import (
    REAL_KINDS,
    Kind,
    make_services,
    model_client,
    open_sandboxes,
    running_proxy,
    serve,
)
from tests.fakes.waiting import until
from tests.processes import descendants, running

MESSAGES = [{"role": "user", "content": "Work."}]
HANG_UP_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER value that closes with a reset."""
SHUTDOWN_WATCHER = Counter({"<coroutine object _shutdown_watcher": 1})
"""A task of sse-starlette: one per event loop, from the first stream on."""


class Connection:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, body: dict[str, Any], *, missing_bytes: int = 0) -> None:
        content = json.dumps(body).encode()
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(content) + missing_bytes, content)
        )

    async def leave(self, *, politely: bool = True) -> None:
        if not politely:
            self._writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, HANG_UP_AT_ONCE
            )
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def connect(url: str) -> Connection:
    where = urlsplit(url)
    return Connection(*await asyncio.open_connection(where.hostname, where.port))


def request(*, stream: bool, model: str = "fake-model") -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "stream": stream}


# Two hundred of them


class DisconnectingClients:
    """Clients that disconnect at random moments, several at a time, until enough of them have."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._wanted = 0
        self.left = 0
        self.served = 0

    async def run(self, *, disconnects: int, concurrency: int) -> None:
        self._wanted, self.left, self.served = disconnects, 0, 0
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(self._run_client)

    async def _run_client(self) -> None:
        while self.left < self._wanted:
            wait_s = self._random.choice((0.05, 1.0, 4.0)) * self._random.random()
            model = self._random.choice(("fake-model",) * 5 + ("fake-model:plain",))
            client = await connect(self._url)
            client.send(request(stream=self._random.random() < 0.5, model=model))
            with anyio.move_on_after(wait_s) as waiting:
                await client.reader.read()
            await client.leave(politely=self._random.random() < 0.5)
            if waiting.cancelled_caught:
                self.left += 1
            else:
                self.served += 1


def random_backend(seed: int, marker: str) -> Any:
    """Return a backend that is sometimes silent, and whose commands sometimes do not end."""
    chance = random.Random(seed)
    ends = f"sleep {marker} & seq 1 20000; head -c 300000 /dev/zero > output/zeros.bin"
    commands = (ends, ends, ends, f"trap '' TERM; sleep {marker}")

    def choose(body: dict[str, Any]) -> Item:
        turn = sum(said["role"] == "assistant" for said in body["messages"])
        reply = (
            tool_reply(call("execute_bash", command=chance.choice(commands)), content="Well.")
            if turn < 2
            else tool_reply(call("submit", answer="Done. " * 50))
        )
        whim = chance.random()
        if whim < 0.1:
            return Held(reply, asyncio.Event())
        if whim < 0.2 and body.get("stream"):
            return Held(reply, asyncio.Event(), after_pieces=2)
        return reply

    return choose


EXPECTED_OPEN_FILES: dict[Kind, Counter[str]] = {
    "bubblewrap": Counter(
        {"/memfd:agent (deleted)": 1}
    ),  # the guest agent that each sandbox is started from
    # The Docker SDK keeps some for each URL that it knows; all are closed with it.
    "docker": Counter({"/var/run/docker.sock": DEFAULT_NUM_POOLS * DEFAULT_MAX_POOL_SIZE}),
}


async def until_quiet(kind: Kind, marker: str, state_dir: Path) -> None:
    """Wait until nothing of any sandbox is left."""
    await until(lambda: not running(marker))
    if kind == "bubblewrap":
        await until(lambda: not descendants(os.getpid()) and not cgroups_of(os.getpid()))
    else:
        with closing(Engine()) as engine:
            await until(lambda: not engine.containers(state_dir))


@pytest.mark.parametrize(
    ("kind", "count", "concurrency"),
    [
        ("bubblewrap", 200, 12),
        pytest.param("docker", 30, 8, marks=pytest.mark.docker),
    ],
)
async def test_random_disconnects_leave_no_tasks_sandboxes_or_open_files(
    kind: Kind, count: int, concurrency: int, tmp_path: Path
) -> None:
    marker = f"8{os.getpid()}{count}"
    with anyio.fail_after(120):
        async with scripted_backend(random_backend(1, marker)) as backend:
            model = model_client(backend)
            at_first = open_files()
            async with (
                open_sandboxes(kind, tmp_path) as sandboxes,
                serve(make_services(model, sandboxes, tmp_path)) as url,
            ):
                files, at_work = (
                    open_files() + EXPECTED_OPEN_FILES[kind],
                    tasks() + SHUTDOWN_WATCHER,
                )
                crowd = DisconnectingClients(url, seed=2)
                await crowd.run(disconnects=count, concurrency=concurrency)
                await until_quiet(kind, marker, tmp_path)
                await gone(lambda: tasks() - at_work)
                await model.aclose()  # closes the idle backend connections
                await gone(lambda: open_files() - files)
            await gone(lambda: open_files() - at_first)
    assert crowd.left >= count


# One at a time


@pytest.fixture(params=REAL_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("politely", [True, False])
async def test_disconnect_during_a_command_ends_the_sandbox(
    kind: Kind, stream: bool, politely: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    marker = f"9{os.getpid()}{stream:d}{politely:d}"
    command = f"trap '' TERM INT; sleep {marker}"
    async with (
        scripted_backend([tool_reply(call("execute_bash", command=command))]) as backend,
        running_proxy(backend, kind, tmp_path) as url,
    ):
        with anyio.fail_after(30):
            client = await connect(url)
            client.send(request(stream=stream))
            await until(lambda: running(marker))
        with anyio.fail_after(5):
            await client.leave(politely=politely)
            await until_quiet(kind, marker, tmp_path)
            await until(lambda: "ended: the client disconnected" in caplog.text)
    assert len(backend.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["fake-model", "fake-model:plain"])
async def test_disconnect_before_the_model_answers_cancels_the_call(
    model: str, stream: bool, tmp_path: Path
) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event())]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        with anyio.fail_after(5):
            client = await connect(url)
            client.send(request(stream=stream, model=model))
            seen = await backend.arrived(1)
            await client.leave()
            await seen.gone.wait()


@pytest.mark.parametrize("model", ["fake-model", "fake-model:plain"])
async def test_disconnect_during_the_model_answer_cancels_the_call(
    model: str, tmp_path: Path
) -> None:
    thought = chunk({"reasoning": "Let me think."})
    script = [Held(Frames(frames(thought, "[DONE]")), asyncio.Event(), after_pieces=1)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        with anyio.fail_after(5):
            client = await connect(url)
            client.send(request(stream=True, model=model))
            await client.reader.readuntil(b"Let me think.")
            await client.leave()
            await backend.requests[0].gone.wait()


async def test_disconnect_before_the_request_is_complete_starts_no_run(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend:
        sandboxes = MemorySandboxes()
        model = model_client(backend)
        async with serve(make_services(model, sandboxes, tmp_path)) as url:
            with anyio.fail_after(5):
                client = await connect(url)
                client.send(request(stream=True), missing_bytes=10)
                await client.leave()
        await model.aclose()
    assert (backend.requests, sandboxes.opened) == ([], 0)
