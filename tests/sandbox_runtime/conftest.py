"""Fixtures of all tests of the sandbox runtime."""

import fcntl
from collections.abc import Iterator

import pytest


@pytest.fixture
def root_signal_counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let only one test at a time, among those of all workers, take the timers and queued signals
    that Docker's sandboxes share with root on the host."""
    base = tmp_path_factory.getbasetemp().parent
    with (base / "root-signal-counter.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
