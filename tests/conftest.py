"""Settings and fixtures of all tests."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine generates examples slowly, which is no fault of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
