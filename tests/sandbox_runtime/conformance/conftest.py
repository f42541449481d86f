"""The conformance suite: each test runs on each backend, in a new sandbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import KINDS, open_backend


@pytest.fixture(params=KINDS)
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with open_backend(request.param, tmp_path) as opened:
        yield opened
