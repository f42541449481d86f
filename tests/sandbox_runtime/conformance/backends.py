"""Each way to make a sandbox, by name, for the suite that all of them pass."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.lending import start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.fakes.memory_sandbox import MemorySandbox

DOCKER_IMAGE = os.environ.get("SANDBOX_TEST_IMAGE", "llm-sandbox-proxy/test:latest")
"""Any image with bash and python3; `make test-image` builds this one."""
Opening = Callable[[Path], AbstractAsyncContextManager[Sandbox]]


def open_backend(name: str, state_dir: Path) -> AbstractAsyncContextManager[Sandbox]:
    """A new sandbox of the named kind."""
    openings: dict[str, Opening] = {
        "memory": _memory,
        "bubblewrap": _bubblewrap,
        "docker": _docker,
    }
    return openings[name](state_dir)


@asynccontextmanager
async def _memory(state_dir: Path) -> AsyncIterator[Sandbox]:
    sandbox = MemorySandbox()
    try:
        yield sandbox
    finally:
        await sandbox.close()


@asynccontextmanager
async def _bubblewrap(state_dir: Path) -> AsyncIterator[Sandbox]:
    async with _started(BubblewrapBackend(state_dir=state_dir)) as sandbox:
        yield sandbox


@asynccontextmanager
async def _docker(state_dir: Path) -> AsyncIterator[Sandbox]:
    async with _started(docker_backend(state_dir)) as sandbox:
        yield sandbox


def docker_backend(state_dir: Path, image: str = DOCKER_IMAGE) -> DockerBackend:
    """The engine of this machine; without one the test is skipped, or fails where it must not."""
    try:
        return DockerBackend(image, state_dir=state_dir)
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))


@asynccontextmanager
async def _started(backend: Backend) -> AsyncIterator[Sandbox]:
    try:
        sandbox = await start_sandbox(backend, Isolation())
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.aclose()
