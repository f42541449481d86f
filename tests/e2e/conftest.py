"""What the tests of the whole house share."""

import os
from collections.abc import Iterator

import pytest

from sandbox_runtime.errors import SandboxStartError
from tests.e2e.leftovers import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The Docker engine; without one the test is skipped, or fails if told to."""
    try:
        found = Engine()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield found
    found.close()
