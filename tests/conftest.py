"""Settings and fixtures of all tests."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine generates examples slowly, which is no fault of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def stores_end_with_the_test() -> Iterator[None]:
    yield
    if stores := sys.modules.get("tests.stores"):
        stores.close_stores()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
