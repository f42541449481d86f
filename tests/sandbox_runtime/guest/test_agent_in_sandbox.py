"""The agent in a real sandbox survives disruptive commands and a full disk."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.process_guest import ProcessGuest
from sandbox_runtime.channel import Channel
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.sandbox import OutputCap
from tests.processes import descendants
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.transfer import PLENTY_S, output, write


async def test_deep_directory_tree_and_wide_directory_are_listed(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        dig = (
            "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]; open('bottom', 'w')"
        )
        deep = f'python3 -c "{dig}"'
        await sandbox.exec(deep, timeout_s=PLENTY_S)
        listing = await sandbox.list("/testbed", max_entries=5000)
        assert not listing.truncated
        assert max(entry.path.count("/") for entry in listing.entries) > 1000
        await output(sandbox, "cd /testbed/output; seq 20000 | xargs touch")
        listing = await sandbox.list("/testbed/output", max_entries=100)
        assert (len(listing.entries), listing.truncated) == (100, True)


async def test_put_fails_if_its_directory_is_removed_during_the_upload(
    tmp_path: Path,
) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:

        async def source() -> AsyncIterator[bytes]:
            yield b"first"
            await output(sandbox, "rm -r /testbed/output")
            yield b"second"

        with pytest.raises(SandboxFileError):
            await sandbox.put("/testbed/output/file", source())
        await write(sandbox, "/testbed/output/file", b"again")
        assert await output(sandbox, "cat /testbed/output/file") == "again"


HARD_ON_THE_SHELL = {
    "posix mode and a dashed function": (
        "my-f() { echo f; }; X=kept; set -o posix",
        "echo $X",
        "kept",
    ),
    "functions named as builtins": ("eval() { :; }; exit() { :; }; X=kept", "echo $X", "kept"),
    "a debug trap": ("trap 'echo traced' DEBUG; X=kept", "echo $X", "kept"),
    "a strange IFS": ("IFS=1; X=kept; false", "echo $X", "kept"),
    "no private directory": (
        "rm -rf /run/.shell* /tmp/* /run/*; X=lost",
        "Y=1; echo usable",
        "usable",
    ),
}


@pytest.mark.parametrize("case", HARD_ON_THE_SHELL.values(), ids=HARD_ON_THE_SHELL.keys())
async def test_shell_is_usable_after_disruptive_commands(
    case: tuple[str, str, str], tmp_path: Path
) -> None:
    first, then, expected = case
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        result = await sandbox.exec(first, timeout_s=PLENTY_S)
        assert result.exit_code == (1 if "false" in first else 0)
        assert (await output(sandbox, then)).splitlines()[-1] == expected
        assert await output(sandbox, "Z=2") == ""
        assert (await output(sandbox, "echo $Z")).splitlines()[-1] == "2"


async def test_full_disk_loses_only_the_shell_state_of_the_last_command(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        await output(sandbox, "export KEPT=yes; cd /tmp; f() { echo f; }")
        await sandbox.exec("head -c 4G /dev/zero > /tmp/fill; LOST=1", timeout_s=PLENTY_S)
        assert await output(sandbox, "rm /tmp/fill; echo $KEPT $PWD; f") == "yes /tmp\nf\n"


async def test_removed_working_directory_is_reported_and_replaced_by_testbed(
    tmp_path: Path,
) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        await output(sandbox, "mkdir /tmp/b; cd /tmp/b; rm -r /tmp/b")
        result = await sandbox.exec("echo $PWD; pwd", timeout_s=PLENTY_S)
        assert result.stdout == "/testbed\n/testbed\n"
        assert "was removed" in result.stderr


async def test_carriage_returns_do_not_count_as_lines(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        progress = "for i in $(seq 1000); do printf '%d\\r' $i; done; echo"
        cap = OutputCap(max_bytes=100_000, max_lines=100)
        assert not (await sandbox.exec(progress, timeout_s=PLENTY_S, cap=cap)).truncated


async def test_commands_cannot_stop_or_kill_the_agent(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        await sandbox.exec("kill -STOP 1; kill -KILL 1; kill -INT 1; kill 1", timeout_s=PLENTY_S)
        assert await output(sandbox, "echo well") == "well\n"


async def test_sandbox_whose_agent_is_stopped_by_sigstop_is_lost(tmp_path: Path) -> None:
    backend = BubblewrapBackend(state_dir=tmp_path)
    channel = Channel(await backend.start(Isolation()))
    await channel.connect(20)
    sandbox = GuestSandbox(channel)
    assert isinstance(channel.guest, ProcessGuest)
    for pid in descendants(channel.guest.pid):
        os.kill(pid, signal.SIGSTOP)
    with anyio.fail_after(60), pytest.raises(SandboxLostError):
        await sandbox.list("/testbed")


async def test_slow_output_callback_does_not_lose_the_sandbox(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        waited = False

        async def slow(stream: str, text: str) -> None:
            nonlocal waited
            if not waited:
                waited = True
                await output(sandbox, "sleep 5.5")  # longer than the command and its grace

        flood = "head -c 2000000 /dev/zero | tr '\\0' x"
        result = await sandbox.exec(
            flood, timeout_s=0.5, on_output=slow, cap=OutputCap(max_bytes=4_000_000)
        )
        assert (result.stdout_bytes, waited) == (2_000_000, True)
