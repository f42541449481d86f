"""Custom root file systems: unpacked once, completely or not at all, and written only in memory."""

import os
import re
import shutil
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.backends.root_tar import add_programs, add_python

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

SMALL = Isolation(memory_mib=256, disk_mib=32)
PROGRAMS = ("python3", "bash", "cat", "head", "ls", "mkdir", "rm")
OWNER = os.geteuid() or 65534


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host's Python and a few programs, as `docker export` would write them."""
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    with tarfile.open(archive, "w") as tar:
        add_programs(tar, PROGRAMS)
        add_python(tar)
        for name in ("opt", "testbed"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        kept = tarfile.TarInfo("testbed/from-the-image")
        kept.uid, kept.mode = 4321, 0o644
        tar.addfile(kept)
        device = tarfile.TarInfo("dev/sda")
        device.type, device.devmajor, device.devminor = tarfile.BLKTYPE, 8, 0
        tar.addfile(device)
    # Only its owner may read it, and only he may walk to the state directory, as below /root.
    archive.chmod(0o600)
    archive.parent.chmod(0o700)
    return archive


@asynccontextmanager
async def new_sandbox(
    rootfs: Path, state_dir: Path, isolation: Isolation = SMALL
) -> AsyncIterator[Sandbox]:
    with anyio.fail_after(30):
        backend = BubblewrapBackend(rootfs=rootfs, state_dir=state_dir)
        sandbox = await start_sandbox(backend, isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await backend.aclose()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=20)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.strip()


async def test_changes_to_the_root_file_system_last_only_for_one_sandbox(
    image: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    async with new_sandbox(image, tmp_path) as sandbox:
        assert "from-the-image" in (await output(sandbox, "ls /testbed")).split()
        change = (
            "echo more >> from-the-image; rm -r /opt; mkdir /opt; echo new > /opt/new; rm /bin/ls"
        )
        assert await output(sandbox, change) == ""
        assert await output(sandbox, "cat from-the-image /opt/new") == "more\nnew"
    async with new_sandbox(image, tmp_path) as sandbox:
        assert await output(sandbox, "ls -A /opt; cat from-the-image") == ""


async def test_disk_of_a_custom_root_file_system_is_bounded(image: Path, tmp_path: Path) -> None:
    async with new_sandbox(image, tmp_path) as sandbox:
        result = await sandbox.exec("head -c 20M /dev/zero > /opt/a", timeout_s=20)
        assert result.exit_code == 0
        for place in ("/tmp", "/root", "/dev/shm", "/usr/bin"):
            result = await sandbox.exec(f"head -c 20M /dev/zero > {place}/b", timeout_s=20)
            assert "No space left on device" in result.stderr


async def test_sandbox_sees_neither_host_path_nor_device_files_of_the_root_file_system(
    image: Path, tmp_path: Path
) -> None:
    async with new_sandbox(image, tmp_path) as sandbox:
        command = (
            "cat /proc/self/mountinfo /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2> /dev/null; :"
        )
        assert str(tmp_path) not in await output(sandbox, command)
        devices = (await output(sandbox, "ls /dev")).split()
        assert "null" in devices
        assert "sda" not in devices
        assert "localhost" in await output(sandbox, "cat /etc/hosts")


async def test_concurrent_starts_unpack_the_root_file_system_once(
    image: Path, tmp_path: Path
) -> None:
    async def start() -> None:
        async with new_sandbox(image, tmp_path) as sandbox:
            assert await output(sandbox, "echo alive") == "alive"

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(start)
    (unpacked,) = [each for each in (tmp_path / "rootfs").iterdir() if each.is_dir()]
    assert re.fullmatch(r"[0-9a-f]{64}", unpacked.name)
    assert unpacked.stat().st_uid == OWNER


async def test_truncated_tar_fails_the_start_and_leaves_no_files(
    image: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.tar"
    half.write_bytes(image.read_bytes()[: 1 << 20])
    with pytest.raises(SandboxStartError, match=r"cannot unpack .*half.tar'"):
        await BubblewrapBackend(rootfs=half, state_dir=tmp_path).start(SMALL)
    assert [each for each in (tmp_path / "rootfs").iterdir() if each.is_dir()] == []


async def test_root_directory_must_belong_to_the_sandbox_user(image: Path, tmp_path: Path) -> None:
    async with new_sandbox(image, tmp_path):
        (unpacked,) = [each for each in (tmp_path / "rootfs").iterdir() if each.is_dir()]
    async with new_sandbox(unpacked, Path("/nonexistent")) as sandbox:
        assert await output(sandbox, "echo alive") == "alive"
    with pytest.raises(SandboxStartError, match=r"'/usr' belongs to uid 0, but sandboxes run as"):
        await BubblewrapBackend(rootfs=Path("/usr"), state_dir=tmp_path).start(SMALL)


async def test_missing_root_file_system_fails_the_start(tmp_path: Path) -> None:
    backend = BubblewrapBackend(rootfs=tmp_path / "none", state_dir=tmp_path)
    with pytest.raises(SandboxStartError, match=r"cannot use rootfs .*none'.*No such file"):
        await backend.start(SMALL)


async def test_root_file_system_is_read_only_at_the_strict_level(
    image: Path, tmp_path: Path
) -> None:
    async with new_sandbox(image, tmp_path, replace(SMALL, level="strict")) as sandbox:
        for place in ("/", "/opt", "/usr/bin", "/etc"):
            result = await sandbox.exec(f"echo > {place}/file", timeout_s=20)
            assert re.search("Read-only file system|Permission denied", result.stderr)
        mine = "cd; echo fine > file; echo fine > /tmp/file; cat file /testbed/../tmp/file; echo ~"
        assert await output(sandbox, mine) == "fine\nfine\n/home/sandbox"


async def test_root_file_system_needs_no_python(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        add_programs(tar, ("bash", "cat"))
    tmp_path.chmod(0o700)
    async with new_sandbox(archive, tmp_path) as sandbox:
        assert await output(sandbox, "echo $((6 * 7)) > file; cat file") == "42"


async def test_replaced_tar_is_unpacked_as_a_new_root_file_system(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    backend = BubblewrapBackend(rootfs=archive, state_dir=tmp_path)
    prints = set()
    for program in ("cat", "ls"):
        with tarfile.open(archive, "w") as tar:
            add_programs(tar, ("bash", program))
        prints.add(await backend.fingerprint())
        sandbox = await start_sandbox(backend, SMALL)
        assert await output(sandbox, f"type -t {program}") == "file"
        await sandbox.close()
    assert len(prints) == 2
    archive.unlink()
    with pytest.raises(SandboxStartError, match="cannot use rootfs"):
        await backend.fingerprint()
    await backend.aclose()
