"""The parts of the bench that lease sandboxes in a process of their own."""

import os
import shutil
import subprocess
import sys

import anyio
import pytest

from tests.postgresql import find_programs


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_bench_owner_command_measures_the_sandboxes_that_a_killed_process_leaves() -> None:
    command = [sys.executable, "-m", "bench", "owner", "--no-peers", "--rounds", "1"]
    with anyio.fail_after(60):
        ended = await anyio.run_process(command, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert "bubblewrap: left after the next sweep" in ended.stdout.decode()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_replicas_bench_loses_no_answer_and_leaves_no_container_or_cgroup() -> None:
    if find_programs() is None:
        if os.environ.get("REQUIRE_POSTGRESQL"):
            pytest.fail("Debian's package postgresql is missing")
        pytest.skip("Debian's package postgresql is missing")
    command = [sys.executable, "-m", "bench.replicas", "--minutes", "0.05", "--clients", "4"]
    ended = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    lines = ended.stdout.decode().splitlines()
    assert "wrong: 0, lost: 0" in lines
    assert lines[-1].startswith("left: 0 containers, 0 cgroups, ")
