"""The checks of a sandbox backend: before the server starts, and of the commands."""

import pytest

from policies.isolation import Isolation
from proxy.doctor import require_working_backend, smoke_test_cluster
from sandbox_runtime.backends.base import Check
from sandbox_runtime.errors import SandboxStartError
from tests.fakes.sandbox_backend import FakeSandboxBackend


async def test_sandbox_backend_with_a_failed_check_is_refused_and_closed() -> None:
    backend = FakeSandboxBackend()
    backend.checks = [
        Check("user", True, "each sandbox runs as a host uid of its own"),
        Check("bounds", False, "per process only"),
        Check("network", False, "shared"),
    ]
    with pytest.raises(SandboxStartError) as raised:
        await require_working_backend(backend, Isolation(), self_test=False)
    assert str(raised.value) == "bounds: per process only; network: shared"
    assert (backend.asked, backend.closed) == (0, True)


async def test_sandbox_backend_whose_checks_pass_is_accepted() -> None:
    backend = FakeSandboxBackend()
    backend.checks = [Check("bounds", True, "per sandbox")]
    assert await require_working_backend(backend, Isolation(), self_test=False) == ()
    assert (len(backend.guests), backend.alive, backend.closed) == (1, set(), False)


async def test_sandbox_is_closed_if_a_check_fails_after_its_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = FakeSandboxBackend()
    backend.input_is_closed = True
    code = await smoke_test_cluster(lambda: backend, Isolation(), self_test=False)
    assert "FAIL  fake sandbox: sandbox fake-1 is gone" in capsys.readouterr().out
    assert (code, len(backend.guests), backend.alive) == (1, 2, set())
