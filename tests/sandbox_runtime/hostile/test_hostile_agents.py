"""A hostile agent in a real sandbox loses only that sandbox.

A backend is given it in place of the agent's program.
"""

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_agent import AgentVolumes
from sandbox_runtime.backends.docker_container import ImageMetadata
from sandbox_runtime.channel import Channel
from sandbox_runtime.errors import (
    FileTimeoutError,
    SandboxLostError,
    SandboxStartError,
)
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import OutputCap, Sandbox
from sandbox_runtime.streams import ProgramConnection
from tests.sandbox_runtime.conformance.backends import backend_of
from tests.sandbox_runtime.transfer import read, write

AGENT = Path(__file__).with_name("hostile_agent.py").read_bytes()
SMALL = Isolation(memory_mib=256, pids=32)
PATIENCE_S = 1.0
ENOUGH_S = 60.0
CAP = OutputCap(max_bytes=1000, max_lines=10)
HOST_BYTES = 64 << 20
"""Maximum growth of this process while it is flooded."""
RESET_PEAK = Path("/proc/self/clear_refs")
BETWEEN_COMMANDS_S = 0.1
KINDS = [
    "bubblewrap",
    *(pytest.param(kind, marks=pytest.mark.docker) for kind in ("docker", "docker-runsc")),
]
COMMANDS = {
    "garbage": "broke the protocol",
    "more_than_its_credit": "broke the protocol|more output than allowed",
    "frames_of_one_byte": "more output than allowed|broke the protocol",
    "frame_of_four_gigabytes": "broke the protocol: frame of 4294967295 bytes",
    "half_a_frame": "did not end a command in time|no answer",
    "closed_output": "is gone",
    "deep_report": "broke the protocol",
    "number_that_is_none": "is gone: the agent reported ",
    "number_beyond_bounds": "is gone: the agent reported ",
    "end_within_a_frame": "is gone",
    "children_that_write": "broke the protocol",
    "errors_without_end": "bytes of diagnostics|did not end a command in time|no answer",
    "silence": "did not end a command in time|no answer",
    "header_that_never_ends": "did not end a command in time|no answer",
    "connections_reset": "did not end a command in time|broke the protocol|no answer",
    "connections_finished": "broke the protocol: more than 256 connections",
    "connections_full": "broke the protocol: more than 256 connections",
    "connections_with_more_than_their_credit": "broke the protocol: 65536 bytes where 16384",
    "credit_for_nothing": "broke the protocol: malformed credit",
    "end_of_no_connection": "broke the protocol: frame type 10 on stream 2, which is not open",
    "end_of_no_operation": "broke the protocol: frame type 9 on stream 101, which is not open",
    "report_before_its_command": "broke the protocol: frame type 9 on stream 3, which is not open",
}
HELLOS = {
    "no JSON": "{",
    "no object": "[]",
    "another version": '{"version": 1}',
    "long": "[" * 9000,
}


class HostileVolumes(AgentVolumes):
    """Volumes with another program in place of the agent's. Their names are added to `made`."""

    def __init__(self, backend: DockerBackend, program: Path, made: set[str]) -> None:
        super().__init__(backend._engine, backend._labels)
        self._program = program
        self._made = made

    async def volume_for(self, program: Path, image: ImageMetadata) -> str:
        name = await super().volume_for(self._program, image)
        self._made.add(name)
        return name


@pytest.fixture(scope="module")
def volumes() -> Iterator[set[str]]:
    """Names of volumes, which are removed at the end."""
    made: set[str] = set()
    yield made
    if made:
        subprocess.run(["docker", "volume", "rm", *made], check=True, capture_output=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend_with_agent(kind: str, tmp_path: Path, volumes: set[str]) -> Callable[[bytes], Backend]:
    """Return a function that makes a backend which starts a given program in place of the agent."""

    def make(program: bytes) -> Backend:
        backend = backend_of(kind, tmp_path / "hostile")
        if isinstance(backend, BubblewrapBackend):
            backend._agent = program
        else:
            assert isinstance(backend, DockerBackend)
            path = tmp_path / "agent"
            path.write_bytes(program)
            backend._agent_volumes = HostileVolumes(backend, path, volumes)
        return backend

    return make


@pytest.fixture
def hostile(backend_with_agent: Callable[[bytes], Backend]) -> Backend:
    return backend_with_agent(AGENT)


@pytest.fixture
async def neighbour(kind: str, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox of the real agent, served by the same host process."""
    backend = backend_of(kind, tmp_path / "neighbour")
    sandbox = await start_sandbox(backend, SMALL)
    yield sandbox
    await sandbox.close()
    await backend.aclose()


@asynccontextmanager
async def victim(backend: Backend) -> AsyncIterator[GuestSandbox]:
    """Start a sandbox of the hostile agent; close it and its backend afterwards."""
    channel = Channel(await backend.start(SMALL), silence_timeout_s=PATIENCE_S)
    try:
        await channel.connect(ENOUGH_S)
        yield GuestSandbox(channel)
    finally:
        await channel.close()
        await backend.aclose()


async def hold(connection: ProgramConnection) -> None:
    """Accept a connection and never read it."""
    await anyio.sleep_forever()


@asynccontextmanager
async def attacked(backend: Backend, neighbour: Sandbox) -> AsyncIterator[GuestSandbox]:
    """Yield a victim. Meanwhile the neighbour's commands must work and the host's memory must not
    grow."""
    RESET_PEAK.write_text("5", encoding="ascii")
    before = peak_memory()
    done = anyio.Event()
    async with victim(backend) as sandbox, anyio.create_task_group() as others:
        sandbox.set_connection_handler(hold)
        others.start_soon(commands_go_on, neighbour, done)
        with anyio.fail_after(ENOUGH_S):
            yield sandbox
        done.set()
    assert peak_memory() - before < HOST_BYTES


async def commands_go_on(neighbour: Sandbox, done: anyio.Event) -> None:
    while True:
        result = await neighbour.exec("echo still here", timeout_s=ENOUGH_S)
        assert (result.stdout, result.exit_code) == ("still here\n", 0)
        if done.is_set():
            return
        with anyio.move_on_after(BETWEEN_COMMANDS_S):
            await done.wait()


def peak_memory() -> int:
    """Return the peak resident memory of this process since the write to RESET_PEAK, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) << 10


@pytest.mark.parametrize(("attack", "why"), COMMANDS.items(), ids=COMMANDS)
async def test_hostile_answer_to_a_command_loses_only_its_own_sandbox(
    hostile: Backend, neighbour: Sandbox, attack: str, why: str
) -> None:
    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(SandboxLostError, match=why):
            await sandbox.exec(attack, timeout_s=0.5, cap=CAP)
        with pytest.raises(SandboxLostError):
            await sandbox.exec("silence", timeout_s=1)


async def test_agent_that_never_reads_an_upload_loses_only_its_own_sandbox(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(SandboxLostError, match="no answer"):
            await write(sandbox, "/silence", bytes(8 << 20))


LISTINGS = {
    "paths_that_climb": "listing",
    "entries_without_end": "malformed listing: more than 10000 entries",
    "entry_without_end": "malformed listing: a line has no end",
    "entry_byte_by_byte": "malformed listing: a line has no end",
}


@pytest.mark.parametrize(("attack", "why"), LISTINGS.items(), ids=LISTINGS)
async def test_invalid_listing_loses_only_its_own_sandbox(
    hostile: Backend, neighbour: Sandbox, attack: str, why: str
) -> None:
    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(SandboxLostError, match=why):
            await sandbox.list(f"/{attack}")


async def test_agent_that_sends_more_of_a_file_than_requested_loses_only_its_own_sandbox(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(SandboxLostError, match="more of a file"):
            await read(sandbox, "/more_of_a_file", max_bytes=10)


async def drop(data: bytes) -> None:
    """A sink."""


@pytest.mark.parametrize("attack", ["data_of_one_byte", "frames_byte_by_byte"])
async def test_reading_a_file_sent_in_tiny_pieces_times_out_without_losing_the_sandbox(
    hostile: Backend, neighbour: Sandbox, attack: str
) -> None:
    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(FileTimeoutError):
            await sandbox.get(f"/{attack}", drop, max_bytes=1 << 40, timeout_s=2)
        assert (await sandbox.exec("sound", timeout_s=ENOUGH_S)).exit_code == 0
        assert not sandbox.lost


async def test_timed_out_operations_that_stay_unanswered_lose_only_their_own_sandbox(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async def give_up_without_end(sandbox: GuestSandbox) -> None:
        while True:
            with suppress(FileTimeoutError):
                await sandbox.get("/nothing_answered", drop, max_bytes=1, timeout_s=0)

    async with attacked(hostile, neighbour) as sandbox:
        with pytest.raises(SandboxLostError, match=r"has not answered since|no answer"):
            await give_up_without_end(sandbox)


@pytest.mark.parametrize("greeting", HELLOS.values(), ids=HELLOS)
async def test_invalid_greeting_of_the_agent_fails_the_start_of_the_sandbox(
    backend_with_agent: Callable[[bytes], Backend], greeting: str
) -> None:
    program = AGENT.replace(b"""'{"version": 4}'""", repr(greeting).encode())
    assert program != AGENT
    backend = backend_with_agent(program)
    with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxStartError, match="protocol"):
        await start_sandbox(backend, SMALL)
    await backend.aclose()
