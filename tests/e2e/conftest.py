"""What the tests of the whole house share."""

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
    """What a shell starts in the background ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The Docker engine; without one the test is skipped, or fails if told to."""
    try:
        found = Engine()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield found
    # A proxy killed between making a container and starting it leaves that for its next sweep.
    found.clear(state_dir(tmp_path))
    found.close()
