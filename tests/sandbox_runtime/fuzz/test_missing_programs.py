"""Fuzzing without clang: it is left out, or fails if the environment requires it."""

import sys
from pathlib import Path

import anyio
import pytest

from tests.e2e.proxy_process import ROOT


@pytest.mark.parametrize(("variables", "exit_code"), [({}, 0), ({"REQUIRE_FUZZ": "1"}, 1)])
async def test_missing_compiler_fails_fuzzing_only_if_fuzzing_is_required(
    variables: dict[str, str], exit_code: int, tmp_path: Path
) -> None:
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "tests.sandbox_runtime.fuzz", "1"]
    with anyio.fail_after(60):
        done = await anyio.run_process(command, check=False, cwd=ROOT, env=environment)
    expected = b"left out: fuzzing the agent, for clang is not installed\n"
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, expected, b"")
