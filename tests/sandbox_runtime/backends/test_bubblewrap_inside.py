"""Programs inside bubblewrap: their user, their view of the host, and the agent."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.backends import probes
from tests.sandbox_runtime.transfer import output, write

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

SMALL = Isolation(memory_mib=256, disk_mib=32, pids=32)
NOWHERE = Path("/nonexistent")
STRICT = replace(SMALL, level="strict")


@asynccontextmanager
async def new_sandbox(isolation: Isolation = SMALL) -> AsyncIterator[GuestSandbox]:
    backend = BubblewrapBackend(state_dir=NOWHERE)
    with anyio.fail_after(30):
        sandbox = await start_sandbox(backend, isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await backend.aclose()


async def python(sandbox: Sandbox, program: str) -> str:
    result = await sandbox.exec("python3 -", timeout_s=20, stdin=program.encode())
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


async def test_strict_level_has_no_root_user() -> None:
    async with new_sandbox(STRICT) as sandbox:
        assert await output(sandbox, "id -u; id -g; id -un; echo ~; echo $USER") == (
            "1000\n1000\nsandbox\n/home/sandbox\nsandbox\n"
        )
        assert "CapEff:\t0000000000000000" in await output(sandbox, "cat /proc/self/status")


async def test_strict_level_makes_only_workspace_home_and_temporary_directories_writable() -> None:
    async with new_sandbox(STRICT) as sandbox:
        written = (await python(sandbox, probes.WRITABLE_MOUNTS)).splitlines()
        on_disk = {line.split()[1] for line in written if line.startswith("disk ")}
        assert on_disk == {"/testbed", "/home", "/tmp", "/dev/shm"}
        for place in ("/etc", "/etc/passwd", "/usr", "/", "/var", "/run"):
            assert (await sandbox.exec(f"test -w {place}", timeout_s=20)).exit_code == 1
        assert await output(sandbox, "cd; echo fine > file; cat file; python3 -c 'print(6*7)'") == (
            "fine\n42\n"
        )


@pytest.mark.parametrize("isolation", [SMALL, STRICT])
async def test_script_installed_with_pip_install_user_is_found_on_the_path(
    isolation: Isolation,
) -> None:
    async with new_sandbox(isolation) as sandbox:
        await python(sandbox, probes.INSTALL_USER_SCRIPT)
        assert await output(sandbox, "greet") == "hello\n"


# What is shown of the host


@pytest.mark.parametrize("isolation", [SMALL, STRICT])
async def test_python_and_python3_both_run(isolation: Isolation) -> None:
    which = "import os, sys; print(os.path.realpath(sys.executable))"
    async with new_sandbox(isolation) as sandbox:
        plain = await output(sandbox, f'python -c "{which}"')
        assert plain == await output(sandbox, f'python3 -c "{which}"')
        assert plain.startswith("/usr/")


async def test_certificates_are_visible_and_private_keys_are_not() -> None:
    trusted = (
        "import os, ssl; path = ssl.get_default_verify_paths().capath;"
        " print(sum(os.path.exists(f'{path}/{name}') for name in os.listdir(path)))"
    )
    ours = await anyio.run_process(["/usr/bin/python3", "-c", trusted])
    async with new_sandbox() as sandbox:
        assert await python(sandbox, trusted) == ours.stdout.decode()
        private = "ls -A /etc/ssl /etc/pki 2> /dev/null | grep private"
        assert await output(sandbox, f"{private}; :") == ""


async def test_sandbox_can_read_shared_inputs_and_cannot_write_them(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        directory.chmod(directory.stat().st_mode | 0o555)
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "table.csv").chmod(0o666)
    backend = BubblewrapBackend(state_dir=NOWHERE, inputs=tmp_path)
    for isolation in (SMALL, STRICT):
        sandbox = await start_sandbox(backend, isolation)
        assert await output(sandbox, "cat /testbed/shared/table.csv") == "a,b\n"
        result = await sandbox.exec("echo more >> /testbed/shared/table.csv", timeout_s=20)
        assert "Read-only file system" in result.stderr
        await sandbox.close()


# The agent


async def test_program_inside_the_sandbox_cannot_kill_the_guest_agent() -> None:
    async with new_sandbox() as sandbox:
        await sandbox.exec("kill -9 1; kill -TERM 1; kill -INT 1", timeout_s=20)
        assert await output(sandbox, "echo still there") == "still there\n"


async def test_guest_agent_executable_cannot_be_changed_from_inside_the_sandbox() -> None:
    async with new_sandbox() as sandbox:
        changed = await sandbox.exec("echo x >> /proc/1/exe", timeout_s=20)
        assert changed.exit_code == 1
        # And the directory itself.
        assert await output(sandbox, "ls /proc/self/fd | wc -l") == "4\n"


async def test_file_too_large_for_the_disk_is_refused_and_the_guest_agent_keeps_running() -> None:
    async with new_sandbox() as sandbox:
        with pytest.raises(SandboxFileError):
            await write(sandbox, "/testbed/large", bytes(SMALL.disk_mib + 1 << 20))
        assert await output(sandbox, "echo alive") == "alive\n"


async def test_workspace_with_deeply_nested_directories_is_saved() -> None:
    """Packing took time cubic in the depth: 2 s for 60 levels, minutes for 200."""
    nest = """
import os
os.chdir("/testbed")
for level in range(200):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
"""
    saved = bytearray()

    async def collect(data: bytes) -> None:
        saved.extend(data)

    async with new_sandbox() as sandbox:
        await python(sandbox, nest)
        await output(sandbox, "mkdir -p /testbed/shared /testbed/kept/shared")
        with anyio.fail_after(20):
            await sandbox.snapshot(collect, max_bytes=32 << 20)
    assert b"./kept/shared/" in saved
    assert b"./shared/" not in saved.replace(b"./kept/shared/", b"")
