"""The check of `doctor` for pseudo-terminals, which runs inside a sandbox."""

from pathlib import Path

import pytest

from sandbox_runtime.images import terminal_check
from tests.sandbox_runtime.conformance.backends import open_backend

PTY = Path("/proc/sys/kernel/pty")


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_terminal_check_reports_how_many_sandboxes_the_terminals_suffice_for(
    kind: str, tmp_path: Path
) -> None:
    free = int((PTY / "max").read_text()) - int((PTY / "reserve").read_text())
    async with open_backend(kind, tmp_path) as sandbox:
        check = await terminal_check(sandbox)
    assert check.ok
    assert check.detail.startswith(f"the host has {free} pseudo-terminals for all sandboxes")
    assert f"enough for {free // 32};" in check.detail


@pytest.mark.docker
async def test_sandbox_with_a_separate_kernel_shares_no_terminals_with_the_host(
    tmp_path: Path,
) -> None:
    async with open_backend("docker-runsc", tmp_path) as sandbox:
        check = await terminal_check(sandbox)
    assert check.detail == "the sandbox has pseudo-terminals of its own"
