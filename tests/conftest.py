"""What every test shares."""

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy is slow at making examples too, which says nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
