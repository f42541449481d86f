"""Fixtures of the end-to-end tests."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.leftovers import Engine, open_engine
from tests.e2e.proxy_process import state_dir


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Restore SIGINT: a shell ignores it for background jobs, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The Docker engine, see `open_engine`."""
    with open_engine(state_dir(tmp_path)) as found:
        yield found
