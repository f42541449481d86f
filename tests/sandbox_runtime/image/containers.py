"""Sandboxes of a chosen image."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from policies.isolation import Isolation
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import docker_backend


@asynccontextmanager
async def container(image: str, state_dir: Path) -> AsyncIterator[Sandbox]:
    """Start a sandbox of the image, as the proxy does."""
    backend = docker_backend(state_dir, image)
    try:
        sandbox = await start_sandbox(backend, Isolation())
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.aclose()
