"""What the tests of the whole house share."""

import os
from collections.abc import Iterator

import docker
import docker.errors
import pytest

from tests.e2e.leftovers import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The Docker engine; without one the test is skipped, or fails if told to."""
    try:
        found = Engine()
    except docker.errors.DockerException as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(f"no Docker engine answers: {error}")
    yield found
    found.close()
