"""The parts of the bench that lease sandboxes in a process of their own."""

import shutil
import sys

import anyio
import pytest


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_bench_part_owner_measures_the_sandboxes_of_a_killed_process() -> None:
    command = [sys.executable, "-m", "bench", "owner", "--no-peers", "--rounds", "1"]
    with anyio.fail_after(60):
        ended = await anyio.run_process(command, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert "bubblewrap: left after the next sweep" in ended.stdout.decode()
