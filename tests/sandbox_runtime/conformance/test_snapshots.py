"""A workspace moves from one sandbox to another; its manifest has the hash of each file."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_runtime.errors import FileSizeLimitError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import HashLimits, Sandbox
from tests.fakes.memory_sandbox import MemorySandbox
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.transfer import PLENTY_S, copy_workspace, output, read, write

PLENTY = 1 << 30


async def test_restored_workspace_equals_the_original(sandbox: Sandbox, another: Sandbox) -> None:
    await output(sandbox, "mkdir -p a/b; echo text > 'a/b/with space'; ln -s a/b link; cd a")
    await write(sandbox, "/testbed/run.sh", b"#!/bin/sh\n")
    await output(sandbox, "chmod 755 /testbed/run.sh")
    await another.restore(_pieces(await _snapshot(sandbox)))
    assert await read(another, "/testbed/a/b/with space") == b"text\n"
    assert await output(another, "cat 'link/with space'") == "text\n"
    assert await output(another, "test -x run.sh && echo executable") == "executable\n"


async def test_restored_workspace_is_independent_of_the_original(
    sandbox: Sandbox, another: Sandbox
) -> None:
    await write(sandbox, "/testbed/file", b"before" * 100_000)
    await copy_workspace(sandbox, another)
    assert await read(another, "/testbed/file") == b"before" * 100_000
    await write(another, "/testbed/file", b"after")
    assert await read(sandbox, "/testbed/file") == b"before" * 100_000


async def test_snapshot_does_not_contain_the_holes_of_sparse_files(
    sandbox: Sandbox, another: Sandbox, request: pytest.FixtureRequest
) -> None:
    if isinstance(sandbox, MemorySandbox):
        pytest.skip("files in memory have no holes")
    if "runsc" in request.node.name:
        pytest.skip("Debian's gVisor does not report the holes of files")
    await output(sandbox, "truncate -s 64M sparse; printf end >> sparse")
    snapshot = await _snapshot(sandbox)
    await another.restore(_pieces(snapshot))
    assert len(snapshot) < 1 << 20
    assert await output(another, "stat -c %s sparse; tail -c 3 sparse") == "67108867\nend"


async def test_restore_in_a_closed_sandbox_is_refused(sandbox: Sandbox, another: Sandbox) -> None:
    await another.close()
    with pytest.raises(SandboxLostError):
        await copy_workspace(sandbox, another)


async def test_snapshot_over_max_bytes_is_refused_and_leaves_the_sandbox_usable(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/large", bytes(100_000))
    with pytest.raises(FileSizeLimitError):
        await sandbox.snapshot(_nowhere, max_bytes=50_000)
    assert await output(sandbox, "echo well") == "well\n"


async def test_invalid_snapshot_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFileError):
        await sandbox.restore(_pieces(b"this is no tar " * 100))
    assert await output(sandbox, "echo well") == "well\n"


async def test_listing_with_hashes_has_the_hash_of_every_regular_file(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    await write(sandbox, "/testbed/data/large", data)
    await write(sandbox, "/testbed/data/empty", b"")
    await output(sandbox, "ln -s large data/link; mkdir data/directory")
    listing = await sandbox.list("/testbed/data", hashes=HashLimits(len(data), PLENTY_S))
    assert {entry.path: entry.sha256 for entry in listing.entries} == {
        "directory": "",
        "empty": hashlib.sha256(b"").hexdigest(),
        "large": hashlib.sha256(data).hexdigest(),
        "link": "",
    }


@pytest.fixture
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """Another sandbox of the same backend."""
    kind = request.node.callspec.params["sandbox"]
    async with open_backend(kind, tmp_path / "another") as opened:
        yield opened


async def _snapshot(sandbox: Sandbox) -> bytes:
    data = bytearray()

    async def keep(piece: bytes) -> None:
        data.extend(piece)

    size = await sandbox.snapshot(keep, max_bytes=PLENTY)
    assert size == len(data)
    return bytes(data)


async def _nowhere(piece: bytes) -> None:
    pass


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 50_000):
        yield data[start : start + 50_000]
