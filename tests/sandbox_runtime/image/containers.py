"""The full image, and sandboxes of a chosen image."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from policies.isolation import Isolation
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import docker_backend

FULL = os.environ.get("SANDBOX_FULL_IMAGE", "llm-sandbox-proxy/sandbox:latest")


def full_image(client: Any) -> str:
    """Return the full image's name. Without it, skip the test, or fail with REQUIRE_FULL_IMAGE."""
    try:
        client.inspect_image(FULL)
    except docker.errors.ImageNotFound:
        if os.environ.get("REQUIRE_FULL_IMAGE"):
            raise
        pytest.skip(f"{FULL} is not there: build it with `make image`, which takes minutes")
    return FULL


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
