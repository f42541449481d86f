"""Fixtures of the escape tests. Sandboxes start slowly, so each module shares its own."""

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
