"""Direct access to this machine's Docker engine, for tests that inspect its containers."""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import docker
import pytest

from sandbox_runtime.backends.docker import INSTALL_LABEL, DockerBackend
from sandbox_runtime.errors import SandboxStartError
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE


def docker_backend(state_dir: Path, image: str = DOCKER_IMAGE, **settings: Any) -> DockerBackend:
    """Return a backend of this machine's engine. Without an engine, skip the test, or fail with
    REQUIRE_DOCKER."""
    try:
        return DockerBackend(image, state_dir=state_dir, **settings)
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))


@contextmanager
def client() -> Iterator[Any]:
    """A docker.APIClient."""
    with contextlib.closing(docker.APIClient()) as opened:
        yield opened


def inspect(name: str) -> dict[str, Any]:
    with client() as engine:
        facts: dict[str, Any] = engine.inspect_container(name)
        return facts


def names(state_dir: Path) -> list[str]:
    """Return the names of the containers of this test's installation."""
    label = f"{INSTALL_LABEL}={(state_dir / 'install-id').read_text()}"
    with client() as engine:
        found = engine.containers(all=True, filters={"label": label})
    return [container["Names"][0].strip("/") for container in found]


@asynccontextmanager
async def imported(tar: Path, *changes: str) -> AsyncIterator[str]:
    """Import a tar as an image, with Dockerfile instructions as `changes`; remove the image
    afterwards."""
    tag = f"llm-sandbox-proxy-test:{uuid.uuid4().hex[:8]}"
    flags = [part for change in changes for part in ("--change", change)]
    await anyio.run_process(["docker", "import", *flags, str(tar), tag])
    try:
        yield tag
    finally:
        await anyio.run_process(["docker", "rmi", "--no-prune", tag])


@asynccontextmanager
async def derived(*lines: str) -> AsyncIterator[str]:
    """Build an image from the tests' image with more Dockerfile lines; remove it afterwards."""
    tag = f"llm-sandbox-proxy-test:{uuid.uuid4().hex[:8]}"
    text = "\n".join([f"FROM {DOCKER_IMAGE}", *lines])
    await anyio.run_process(["docker", "build", "--quiet", "--tag", tag, "-"], input=text.encode())
    try:
        yield tag
    finally:
        await anyio.run_process(["docker", "rmi", tag])
