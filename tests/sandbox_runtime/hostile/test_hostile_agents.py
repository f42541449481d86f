"""A hostile agent inside a real sandbox: it loses that sandbox, and nobody else notices.

The image has the agent as its `python3`, which an operator's image could have as well; bubblewrap
is given it in place of the native one.
"""

import base64
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.channel import Channel
from sandbox_runtime.errors import SandboxGoneError, SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.lending import start_sandbox
from sandbox_runtime.sandbox import OutputCap, Sandbox, SandboxRef
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE, backend_of, docker_backend
from tests.sandbox_runtime.transfer import read, write

AGENT = Path(__file__).with_name("hostile_agent.py").read_bytes()
SMALL = Isolation(memory_mib=256, pids=32)
PATIENCE_S = 1.0
ENOUGH_S = 60.0
CAP = OutputCap(max_bytes=1000, max_lines=10)
HOST_BYTES = 64 << 20
"""What this process may grow by while it is flooded; the rest of it works meanwhile."""
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
    "number_that_is_none": "is gone: it ",
    "number_beyond_bounds": "is gone: it ",
    "end_within_a_frame": "is gone",
    "children_that_write": "broke the protocol",
    "errors_without_end": "bytes of diagnostics|did not end a command in time|no answer",
    "silence": "did not end a command in time|no answer",
}
HELLOS = {
    "no JSON": "{",
    "no object": "[]",
    "another version": '{"version": 1}',
    "long": "[" * 9000,
}


@contextmanager
def built(lines: str) -> Iterator[str]:
    """An image of a Dockerfile's lines; gone at the end."""
    tag = f"llm-sandbox-proxy-test:{uuid.uuid4().hex[:8]}"
    command = ["docker", "build", "--quiet", "--tag", tag, "-"]
    try:
        subprocess.run(command, input=lines.encode(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(f"no image can be built: {error}")
    yield tag
    subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The tests' image with the hostile agent as its python3."""
    copy = f"echo {base64.b64encode(AGENT).decode()} | base64 -d > /usr/local/sbin/python3"
    with built(f"FROM {DOCKER_IMAGE}\nRUN {copy} && chmod 755 /usr/local/sbin/python3\n") as tag:
        yield tag


@pytest.fixture(params=list(HELLOS.values()), ids=list(HELLOS))
def greeting(image: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The same, with a greeting of its own."""
    with built(f"FROM {image}\nENV HOSTILE_HELLO='{request.param}'\n") as tag:
        yield tag


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hostile(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Backend:
    if kind == "bubblewrap":
        backend = BubblewrapBackend(state_dir=tmp_path)
        backend._agent = AGENT
        return backend
    runtime = "runsc" if kind == "docker-runsc" else None
    image = request.getfixturevalue("image")
    return docker_backend(tmp_path / "hostile", image, agent="python", runtime=runtime)


@pytest.fixture
async def neighbour(kind: str, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox with an agent of ours, in the same process of the host."""
    backend = backend_of(kind, tmp_path / "neighbour")
    sandbox = await start_sandbox(backend, SMALL)
    yield sandbox
    await sandbox.close()
    await backend.aclose()


@asynccontextmanager
async def victim(backend: Backend) -> AsyncIterator[GuestSandbox]:
    """A sandbox of the hostile agent, and the end of its backend."""
    channel = Channel(await backend.start(SMALL), patience_s=PATIENCE_S)
    try:
        await channel.connect(ENOUGH_S)
        yield GuestSandbox(channel, SandboxRef(backend.name, channel.guest.id))
    finally:
        await channel.close()
        await backend.aclose()


async def undisturbed(neighbour: Sandbox) -> None:
    result = await neighbour.exec("echo still here", timeout_s=ENOUGH_S)
    assert (result.stdout, result.exit_code) == ("still here\n", 0)


def own_memory() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("attack", "why"), COMMANDS.items(), ids=COMMANDS)
async def test_a_command_answered_by_an_attack_costs_that_sandbox_only(
    hostile: Backend, neighbour: Sandbox, attack: str, why: str
) -> None:
    before = own_memory()
    async with victim(hostile) as sandbox, anyio.create_task_group() as others:
        others.start_soon(undisturbed, neighbour)
        with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxGoneError, match=why):
            await sandbox.exec(attack, timeout_s=0.5, cap=CAP)
        with pytest.raises(SandboxGoneError):
            await sandbox.exec("silence", timeout_s=1)
    await undisturbed(neighbour)
    assert own_memory() - before < HOST_BYTES


async def test_a_file_that_nobody_takes_costs_that_sandbox_only(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async with victim(hostile) as sandbox:
        with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxGoneError, match="no answer"):
            await write(sandbox, "/silence", bytes(8 << 20))
    await undisturbed(neighbour)


async def test_a_listing_that_climbs_costs_that_sandbox_only(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async with victim(hostile) as sandbox:
        with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxGoneError, match="listing"):
            await sandbox.list("/paths_that_climb")
    await undisturbed(neighbour)


async def test_a_file_longer_than_asked_for_costs_that_sandbox_only(
    hostile: Backend, neighbour: Sandbox
) -> None:
    async with victim(hostile) as sandbox:
        with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxGoneError, match="more of a file"):
            await read(sandbox, "/more_of_a_file", max_bytes=10)
    await undisturbed(neighbour)


@pytest.mark.docker
async def test_a_greeting_that_is_none_of_ours_starts_no_sandbox(
    greeting: str, tmp_path: Path
) -> None:
    backend = docker_backend(tmp_path, greeting, agent="python")
    with anyio.fail_after(ENOUGH_S), pytest.raises(SandboxStartError, match="protocol"):
        await start_sandbox(backend, SMALL)
    await backend.aclose()
