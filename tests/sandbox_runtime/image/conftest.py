"""The engine, and the small image built on it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.images import build_image

SLIM = "llm-sandbox-proxy/slim:latest"


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    """A docker.APIClient. Skips the test without an engine, or fails with REQUIRE_DOCKER."""
    try:
        found, _ = connect()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield found
    found.close()


@pytest.fixture(scope="session")
def slim(client: Any) -> str:
    """The name of the small image, which is built first. After `make test-image` that is quick."""
    assert build_image("slim", SLIM, "--quiet") == 0
    return SLIM
