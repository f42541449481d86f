"""What these tests share: sandboxes take a while to start, so each file has its own for all."""

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
