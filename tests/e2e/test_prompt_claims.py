"""Claims of the system prompt and tool descriptions, verified in real sandboxes."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from policies.egress import Egress
from policies.isolation import Isolation, Level
from policies.limits import Limits
from policies.profile import Profile
from policies.prompts import EXPECTED_SOFTWARE, SandboxContents, system_prompt
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.images import MODULES, PROGRAMS, installed_programs
from sandbox_runtime.tools import make_tools
from sandbox_runtime.tools.base import Observation
from sandbox_runtime.tools.bash import SCHEMA as BASH
from tests.fakes.server import REAL_KINDS, Kind, open_sandboxes

in_every_sandbox = pytest.mark.parametrize("kind", REAL_KINDS)
at_every_level = pytest.mark.parametrize("level", ["standard", "strict"])
SMALL = Isolation(memory_mib=256, cpus=0.5, disk_mib=64)
HEAVY = "python3 -c 'b = bytearray(400 << 20); print(len(b))'"
BUSY = "for i in 1 2 3; do timeout 1 sh -c 'while :; do :; done' & done; wait"
BASH_WORDS = BASH["function"]["description"]
DIAL = 'import socket; socket.create_connection(("192.0.2.1", 80), 2)'

Bash = Callable[..., Awaitable[Observation]]


@asynccontextmanager
async def prompt_and_bash(
    kind: Kind, state_dir: Path, profile: Profile
) -> AsyncIterator[tuple[str, Bash]]:
    """Yield the system prompt and a bash call for a sandbox of that profile."""
    _, tool, _ = make_tools(profile)
    async with (
        open_sandboxes(kind, state_dir) as sandboxes,
        sandboxes.lease(profile.isolation) as lease,
    ):

        async def bash(command: str, **arguments: object) -> Observation:
            limit_s = profile.limits.command_timeout_s
            return await tool.run(lease, {"command": command, **arguments}, timeout_s=limit_s)

        software = await installed_programs(await lease.sandbox())
        yield system_prompt(profile, SandboxContents(software)), bash


@in_every_sandbox
@at_every_level
async def test_directories_that_the_prompt_names_exist_and_are_writable(
    kind: Kind, level: Level, tmp_path: Path
) -> None:
    profile = Profile(isolation=Isolation(level=level))
    async with prompt_and_bash(kind, tmp_path, profile) as (prompt, bash):
        assert f"Working directory: {WORKING_DIR}. Files the user gave: {INPUT_DIR}." in prompt
        assert (await bash("pwd")).text.endswith(f"\n{WORKING_DIR}")
        for place in (WORKING_DIR, INPUT_DIR):
            assert (await bash(f"touch {place}/x && rm {place}/x")).exit_code == 0, place
        made = await bash(f"mkdir -p {OUTPUT_DIR} && echo 1 > {OUTPUT_DIR}/a && ls -d {OUTPUT_DIR}")
    assert made.exit_code == 0


@in_every_sandbox
async def test_sandbox_user_is_root_if_the_system_prompt_says_so(
    kind: Kind, tmp_path: Path
) -> None:
    async with prompt_and_bash(kind, tmp_path, Profile()) as (prompt, bash):
        assert "- You are root. " in prompt
        assert (await bash("id -u")).text.endswith("\n0")


@in_every_sandbox
async def test_unprivileged_user_can_write_only_to_the_directories_that_the_prompt_names(
    kind: Kind, tmp_path: Path
) -> None:
    profile = Profile(isolation=Isolation(level="strict"))
    async with prompt_and_bash(kind, tmp_path, profile) as (prompt, bash):
        assert f"You are not root and the system is read-only: write below {WORKING_DIR}," in prompt
        own_files = await bash('touch /testbed/x /tmp/x "$HOME/x" && [ "$(id -u)" != 0 ]')
        assert own_files.exit_code == 0
        for place in ("/", "/usr", "/etc", "/bin", "/var", "/root"):
            assert (await bash(f"touch {place}/x")).exit_code != 0, place


@in_every_sandbox
async def test_memory_limit_is_as_the_prompt_says(kind: Kind, tmp_path: Path) -> None:
    async with prompt_and_bash(kind, tmp_path, Profile(isolation=SMALL)) as (prompt, bash):
        assert "There are 256 MiB of memory, 0.5 processors and 64 MiB of disk." in prompt
        assert "out of memory" in (await bash(HEAVY)).text
    enough = Profile(isolation=replace(SMALL, memory_mib=1024))
    async with prompt_and_bash(kind, tmp_path, enough) as (_, bash):
        assert (await bash(HEAVY)).exit_code == 0


@in_every_sandbox
async def test_processor_limit_is_as_the_prompt_says(kind: Kind, tmp_path: Path) -> None:
    async with prompt_and_bash(kind, tmp_path, Profile(isolation=SMALL)) as (_, bash):
        seen = await bash(f"TIMEFORMAT=%R; time {{ {BUSY}; }}")
    took_s = float(re.findall(r"^([0-9.]+)$", seen.text, re.MULTILINE)[-1])
    # Three busy loops; a margin of half for accounting by period.
    assert 0 < seen.cpu_s <= 0.5 * took_s * 1.5


@in_every_sandbox
async def test_disk_limit_is_as_the_prompt_says(kind: Kind, tmp_path: Path) -> None:
    async with prompt_and_bash(kind, tmp_path, Profile(isolation=SMALL)) as (prompt, bash):
        assert "64 MiB of disk." in prompt
        assert (await bash("head -c 20M /dev/zero > /testbed/a")).exit_code == 0
        filling = "for i in $(seq 100); do head -c 4M /dev/zero > /testbed/b$i; done"
        if kind == "bubblewrap":
            assert "No space left on device" in (await bash(filling)).text
        else:  # Docker's disk is polled, and a full sandbox is killed after a delay
            with pytest.raises(SandboxLostError, match="disk"):
                await bash(f"{filling}; sleep infinity")


@in_every_sandbox
@at_every_level
async def test_shell_state_and_background_processes_carry_over_to_the_next_command(
    kind: Kind, level: Level, tmp_path: Path
) -> None:
    profile = Profile(isolation=Isolation(level=level))
    assert "Directory, variables, functions and background processes (&) carry over" in BASH_WORDS
    async with prompt_and_bash(kind, tmp_path, profile) as (_, bash):
        await bash("cd /tmp; x=forty; two() { echo two; }; sleep 100 & echo $! > /testbed/pid")
        seen = await bash('echo "$PWD $x $(two)"; kill -0 "$(cat /testbed/pid)" && echo alive')
    assert seen.text.endswith("/tmp forty two\nalive")


@in_every_sandbox
async def test_command_timeout_and_job_wait_are_as_the_prompt_says(
    kind: Kind, tmp_path: Path
) -> None:
    limits = Limits(command_timeout_s=1, max_command_timeout_s=60, command_wait_s=30)
    async with prompt_and_bash(kind, tmp_path, Profile(limits=limits)) as (prompt, bash):
        assert (
            "A command is stopped after 1 s, or its timeout_s (at most 60); after 30 s it goes"
        ) in prompt
        assert "(timed out)" in (await bash("sleep 100")).text
        longer = await bash("sleep 1.5; echo done", timeout_s=50)
        assert longer.text.endswith("done")
    waits = replace(limits, command_wait_s=0.2, command_timeout_s=60)
    async with prompt_and_bash(kind, tmp_path, Profile(limits=waits)) as (_, bash):
        assert "as job" in (await bash("sleep 50")).text


@in_every_sandbox
@at_every_level
async def test_sandbox_without_a_network_reaches_nothing(
    kind: Kind, level: Level, tmp_path: Path
) -> None:
    profile = Profile(isolation=Isolation(level=level))
    async with prompt_and_bash(kind, tmp_path, profile) as (prompt, bash):
        assert "The sandbox has no network." in prompt
        seen = await bash(f"python3 -c '{DIAL}'")
    assert "OSError: [Errno 101] Network is unreachable" in seen.text


@in_every_sandbox
async def test_error_for_a_denied_host_names_the_allowlist(kind: Kind, tmp_path: Path) -> None:
    egress = Egress("allowlist", allowed_hosts=("data.example.org",))
    async with prompt_and_bash(kind, tmp_path, Profile(isolation=Isolation(network=egress))) as (
        prompt,
        bash,
    ):
        assert "HTTP and HTTPS reach these hosts: data.example.org; nothing else does." in prompt
        assert "Programs find the way by the proxy variables that are set." in prompt
        seen = await bash("curl -sS http://other.example.com/")
    assert "other.example.com is not in this sandbox's allowlist" in seen.text


@in_every_sandbox
async def test_software_that_the_prompt_lists_can_be_called_and_imported(
    kind: Kind, tmp_path: Path
) -> None:
    async with prompt_and_bash(kind, tmp_path, Profile()) as (prompt, bash):
        listed = prompt.split("Installed: ")[1].split(".\n")[0].split(", ")
        for name in listed:
            how = f"command -v {name}" if name in PROGRAMS else f"python3 -c 'import {name}'"
            assert (await bash(how)).exit_code == 0, name
    assert "python3" in listed
    assert set(listed) <= {*PROGRAMS, *MODULES} - EXPECTED_SOFTWARE
