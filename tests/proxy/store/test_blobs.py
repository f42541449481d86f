"""Blobs are written, copied and removed in threads, so that a slow disk delays no request."""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy.store.blobs import PART_SUFFIX, Blob, BlobStore

DISK_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.link", "os.scandir"})
_seen: list[tuple[str, str, int]] = []
"""The audit event, the path and the thread of each file access."""


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event in DISK_EVENTS and isinstance(arguments[0], str | os.PathLike):
        _seen.append((event, os.fspath(arguments[0]), threading.get_ident()))


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_record)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


async def store_blob(blobs: BlobStore, data: bytes) -> Blob:
    async with blobs.open_writer() as writer:
        await writer.write(data)
        return await writer.commit()


async def test_files_are_not_accessed_in_the_event_loops_thread(
    blobs: BlobStore, tmp_path: Path
) -> None:
    _seen.clear()
    blob = await store_blob(blobs, b"x" * 3_000_000)
    copy = await blobs.copy(blob)
    assert [piece async for piece in blobs.read(copy.name)]
    await blobs.remove([blob.name, copy.name])
    async with blobs.open_writer() as writer:
        await writer.write(b"y" * 2_000_000)
    accesses = [access for access in _seen if access[1].startswith(str(tmp_path / "blobs"))]
    assert {event for event, _, _ in accesses} >= {"open", "os.rename", "os.link", "os.remove"}
    assert threading.get_ident() not in {thread for _, _, thread in accesses}
    assert list((tmp_path / "blobs").iterdir()) == []


@pytest.mark.parametrize("size", [1, 3_000_000])
async def test_cancelled_writer_leaves_no_file(size: int, blobs: BlobStore, tmp_path: Path) -> None:
    for turns in range(6):
        storing = asyncio.create_task(store_blob(blobs, b"x" * size))
        for _ in range(turns):
            await asyncio.sleep(0)
        storing.cancel()
        await asyncio.wait({storing})
        if storing.cancelled():
            assert list((tmp_path / "blobs").iterdir()) == []
        else:
            await blobs.remove([storing.result().name])


async def test_empty_blob_is_stored(blobs: BlobStore, tmp_path: Path) -> None:
    async with blobs.open_writer() as writer:
        blob = await writer.commit()
    assert (blob.bytes, blobs.is_intact(blob.name, 0)) == (0, True)
    assert not list((tmp_path / "blobs").glob(f"*{PART_SUFFIX}"))
