"""Fixtures of the end-to-end tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_runtime.errors import SandboxStartError
from tests.e2e.leftovers import Engine
from tests.e2e.proxy_process import state_dir


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Restore SIGINT: a shell ignores it for background jobs, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The Docker engine. Without one, skip the test, or fail if REQUIRE_DOCKER is set."""
    try:
        found = Engine()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield found
    # A proxy killed between creating and starting a container leaves it for the next sweep.
    found.clear(state_dir(tmp_path))
    found.close()
