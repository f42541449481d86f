"""The backends, by name, on which the conformance suite runs."""

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.fakes.memory_sandbox import MemorySandbox
from tests.sandbox_runtime.backends.cluster import kubernetes_backend

DOCKER_IMAGE = os.environ.get("SANDBOX_TEST_IMAGE", "llm-sandbox-proxy/test:latest")
"""An image with the programs that the tests run; `make test-image` builds the default one."""
KINDS = (
    "memory",
    "bubblewrap",
    *(pytest.param(kind, marks=pytest.mark.docker) for kind in ("docker", "docker-runsc")),
    pytest.param("kubernetes", marks=pytest.mark.cluster),
)
"""runsc is gVisor."""
CLUSTER_CPUS = 0.5
"""The CPUs of a Pod. The nodes of a cluster on one machine share its cores, and a Pod holds its
part until its kubelet has removed it, which takes seconds on a busy machine."""


def open_backend(kind: str, state_dir: Path) -> AbstractAsyncContextManager[Sandbox]:
    """Start a sandbox of this kind."""
    if kind == "memory":
        return _memory()
    return started(backend_of(kind, state_dir))


def backend_of(kind: str, state_dir: Path) -> Backend:
    """Return a real backend. Without a Docker engine or a cluster, skip the test, or fail with
    REQUIRE_DOCKER or REQUIRE_CLUSTER."""
    if kind == "bubblewrap":
        return BubblewrapBackend(state_dir=state_dir)
    if kind == "kubernetes":
        return kubernetes_backend()
    return docker_backend(state_dir, runtime="runsc" if kind == "docker-runsc" else None)


@asynccontextmanager
async def _memory() -> AsyncIterator[Sandbox]:
    sandbox = MemorySandbox()
    try:
        yield sandbox
    finally:
        await sandbox.close()


def docker_backend(
    state_dir: Path, image: str = DOCKER_IMAGE, *, runtime: str | None = None
) -> DockerBackend:
    """The engine of this machine."""
    try:
        backend = DockerBackend(image, state_dir=state_dir, runtime=runtime)
        if runtime and runtime not in _engine_runtimes():
            raise SandboxStartError(f"the Docker engine has no runtime {runtime!r}")
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    return backend


def _engine_runtimes() -> dict[str, object]:
    client, _ = connect()
    with contextlib.closing(client):
        runtimes: dict[str, object] = client.info()["Runtimes"]
        return runtimes


@asynccontextmanager
async def started(
    backend: Backend, isolation: Isolation | None = None
) -> AsyncIterator[GuestSandbox]:
    """Start a sandbox; close the sandbox and the backend afterwards."""
    default = Isolation(cpus=CLUSTER_CPUS) if backend.name == "kubernetes" else Isolation()
    try:
        sandbox = await start_sandbox(backend, isolation or default)
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.aclose()
