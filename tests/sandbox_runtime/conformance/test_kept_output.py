"""The full output of a truncated command is kept in the sandbox if requested."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_runtime.errors import FileMissingError
from sandbox_runtime.sandbox import OutputCap, Sandbox
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.transfer import PLENTY_S, copy_workspace, read

KEEP = "/testbed/.kept"
CAP = OutputCap(max_bytes=1000, max_lines=100, retention_directory=KEEP)
WHOLE = "".join(f"{n}\n" for n in range(1, 3001)).encode()


async def test_full_output_is_in_the_file_named_by_the_truncation_marker(sandbox: Sandbox) -> None:
    command = "seq 1 3000; seq 1 2000 >&2"
    result = await sandbox.exec(command, timeout_s=PLENTY_S, cap=CAP)
    assert result.stdout_file.startswith(f"{KEEP}/")
    assert f"lines left out; all of it is in {result.stdout_file} ...]" in result.stdout
    assert f"lines left out; all of it is in {result.stderr_file} ...]" in result.stderr
    assert await read(sandbox, result.stdout_file) == WHOLE
    assert await read(sandbox, result.stderr_file) == WHOLE[: result.stderr_bytes]
    assert (await sandbox.exec(f"cat {result.stdout_file} | wc -l", timeout_s=5)).stdout == "3000\n"


@pytest.mark.parametrize("command", ["seq 1 100", "true", "printf '%0999d' 1"])
async def test_output_within_the_cap_leaves_no_file(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.exec(command, timeout_s=PLENTY_S, cap=CAP)
    assert (result.truncated, result.stdout_file, result.stderr_file) == (False, "", "")
    with suppress(FileMissingError):  # it was not even made
        assert (await sandbox.list(KEEP)).entries == ()


async def test_output_is_not_kept_by_default(sandbox: Sandbox) -> None:
    result = await sandbox.exec("seq 1 3000", timeout_s=PLENTY_S, cap=OutputCap(max_bytes=1000))
    assert (result.truncated, result.stdout_file) == (True, "")
    assert re.search(r"lines left out \.\.\.\]", result.stdout)


async def test_output_file_has_the_first_bytes_up_to_its_limit(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=1000, retention_directory=KEEP, max_kept_bytes=5000)
    result = await sandbox.exec("seq 1 3000", timeout_s=PLENTY_S, cap=cap)
    assert f"; the first 5000 bytes of it all are in {result.stdout_file} ...]" in result.stdout
    assert await read(sandbox, result.stdout_file) == WHOLE[:5000]


async def test_each_command_has_its_own_output_file(sandbox: Sandbox) -> None:
    first, second = [
        (await sandbox.exec(f"seq 1 {n}", timeout_s=PLENTY_S, cap=CAP)).stdout_file
        for n in (3000, 2000)
    ]
    assert first != second
    assert await read(sandbox, first) == WHOLE


async def test_output_is_truncated_if_no_file_can_be_written(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=1000, retention_directory="/dev/null/kept")
    result = await sandbox.exec("seq 1 3000", timeout_s=PLENTY_S, cap=cap)
    assert (result.exit_code, result.truncated, result.stdout_file) == (0, True, "")


async def test_each_output_segment_of_a_job_has_an_output_file_of_its_own(sandbox: Sandbox) -> None:
    command = "seq 1 3000; read line; seq 1 2000"
    first = await sandbox.exec(command, timeout_s=PLENTY_S, cap=CAP, stdin=None, wait_s=3.0)
    assert first.running
    second = await sandbox.wait(first.job_id, wait_s=PLENTY_S, typed_bytes=b"\n")
    assert (second.running, second.exit_code) == (False, 0)
    assert await read(sandbox, first.stdout_file) == WHOLE
    assert (await read(sandbox, second.stdout_file)).endswith(b"\n2000\n")


async def test_output_files_of_a_job_share_the_limit_of_one_command(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=1000, retention_directory=KEEP, max_kept_bytes=15_000)
    command = "; read line; ".join(["seq 1 3000"] * 3)
    readings = [await sandbox.exec(command, timeout_s=PLENTY_S, cap=cap, stdin=None, wait_s=3.0)]
    while readings[-1].running:
        job_id = readings[-1].job_id
        readings.append(await sandbox.wait(job_id, wait_s=3.0, typed_bytes=b"\n"))
    first, second, third = readings
    assert await read(sandbox, first.stdout_file) == WHOLE
    assert await read(sandbox, second.stdout_file) == WHOLE[: 15_000 - len(WHOLE)]
    assert (third.truncated, third.stdout_file) == (True, "")
    assert len((await sandbox.list(KEEP)).entries) == 2


async def test_output_files_of_one_sandbox_share_one_size_limit(tmp_path: Path) -> None:
    much = f"yes | head -c {20 << 20}"
    cap = replace(CAP, max_kept_bytes=20 << 20)
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        await sandbox.exec(much, timeout_s=PLENTY_S, cap=cap)
        second = await sandbox.exec(much, timeout_s=PLENTY_S, cap=cap)
        third = await sandbox.exec(much, timeout_s=PLENTY_S, cap=cap)
        sizes = [entry.bytes for entry in (await sandbox.list(KEEP)).entries]
    assert (sum(sizes), second.truncated, third.stdout_file) == (32 << 20, True, "")


async def test_oldest_output_files_beyond_the_limit_are_removed_from_a_restored_workspace(
    tmp_path: Path,
) -> None:
    async with (
        open_backend("bubblewrap", tmp_path) as before,
        open_backend("bubblewrap", tmp_path) as after,
    ):
        make = "mkdir .observations; cd .observations"
        for age in (1, 2, 3):
            make += f"; truncate -s 7M 'of {age}'; touch -d '{age} days ago' 'of {age}'"
        await before.exec(f"{make}; touch $'new\\nline'", timeout_s=PLENTY_S)
        await copy_workspace(before, after)
        listing = await after.list("/testbed/.observations")
        assert [entry.path for entry in listing.entries] == ["new\nline", "of 1", "of 2"]
        cap = replace(CAP, max_kept_bytes=32 << 20)
        result = await after.exec(f"yes | head -c {20 << 20}", timeout_s=PLENTY_S, cap=cap)
        assert f"the first {18 << 20} bytes of it all are in" in result.stdout
