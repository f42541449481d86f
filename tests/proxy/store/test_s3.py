"""Blobs in an S3 bucket, on a real S3 server."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from proxy.errors import StoreError
from proxy.store.blobs import GRACE_S, WRITE_BYTES, Blob
from proxy.store.s3 import S3BlobStore
from sandbox_runtime.errors import FileMissingError
from tests.clients.locked_packages import MissingError
from tests.s3.server import BUCKET, S3Server, running_s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    try:
        with running_s3_server() as found:
            yield found
    except MissingError as error:
        if os.environ.get("REQUIRE_S3"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def url(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty prefix."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def blobs(url: str, tmp_path: Path) -> S3BlobStore:
    return S3BlobStore(url, tmp_path / "one")


@pytest.fixture
def elsewhere(url: str, tmp_path: Path) -> S3BlobStore:
    """Return the same blobs on another machine, whose cache is empty."""
    return S3BlobStore(url, tmp_path / "two")


@pytest.fixture
def bucket(url: str) -> S3Store:
    return S3Store.from_url(url, client_options={"allow_http": True})


async def store_blob(blobs: S3BlobStore, data: bytes) -> Blob:
    async with blobs.open_writer() as writer:
        await writer.write(data)
        return await writer.commit()


async def content(blobs: S3BlobStore, name: str) -> bytes:
    return b"".join([piece async for piece in blobs.read(name)])


def object_names(bucket: S3Store) -> set[str]:
    return {found["path"] for batch in obstore.list(bucket) for found in batch}


@pytest.mark.parametrize("size", [0, 1, 3_000_000, 12_000_000])
async def test_blob_is_read_on_another_machine(
    blobs: S3BlobStore, elsewhere: S3BlobStore, size: int
) -> None:
    data = os.urandom(size)
    blob = await store_blob(blobs, data)
    assert elsewhere.is_intact(blob.name, size)
    assert not elsewhere.is_intact(blob.name, size + 1)
    assert await content(elsewhere, blob.name) == data
    assert (await elsewhere.local_path(blob.name)).read_bytes() == data
    copy = await elsewhere.copy(blob)
    assert await content(blobs, copy.name) == data


async def test_removed_blob_is_missing_on_all_machines(
    blobs: S3BlobStore, elsewhere: S3BlobStore, bucket: S3Store
) -> None:
    blob = await store_blob(blobs, b"x")
    await blobs.remove([blob.name])
    assert object_names(bucket) == set()
    with pytest.raises(FileMissingError):
        await content(elsewhere, blob.name)
    with pytest.raises(FileNotFoundError):
        await elsewhere.copy(blob)


@pytest.mark.parametrize("size", [1, 3_000_000])
async def test_cancelled_writer_leaves_no_object(
    size: int, blobs: S3BlobStore, bucket: S3Store
) -> None:
    for turns in range(6):
        storing = asyncio.create_task(store_blob(blobs, b"x" * size))
        for _ in range(turns):
            await asyncio.sleep(0)
        storing.cancel()
        await asyncio.wait({storing})
        if not storing.cancelled():
            await blobs.remove([storing.result().name])
        elif object_names(bucket):  # cancelled after the upload: without a row, it is swept
            blobs.sweep({}, time.time() + GRACE_S + 60)
        assert object_names(bucket) == set()


async def test_sweep_removes_old_unknown_blobs_and_nothing_else(
    blobs: S3BlobStore, bucket: S3Store
) -> None:
    known, unknown = await store_blob(blobs, b"known"), await store_blob(blobs, b"unknown")
    obstore.put(bucket, "notes.txt", b"of somebody else")
    sizes = {known.name: 5, "0" * 32: 1}
    assert blobs.sweep(sizes, time.time()) == {"0" * 32}
    assert object_names(bucket) == {known.name, unknown.name, "notes.txt"}
    assert blobs.sweep(sizes, time.time() + GRACE_S + 60) == {"0" * 32}
    assert object_names(bucket) == {known.name, "notes.txt"}


async def test_sweep_removes_unfinished_uploads_of_a_killed_process(
    url: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache-of-a-killed-process"
    cache.mkdir()
    (cache / f"{'0' * 32}.part").write_bytes(b"half of ")
    restarted = S3BlobStore(url, cache)
    restarted.sweep({}, time.time())
    assert len(list(cache.iterdir())) == 1
    async with restarted.open_writer() as writer:
        await writer.write(bytes(WRITE_BYTES))
        restarted.sweep({}, time.time() + GRACE_S + 60)
        assert (await writer.commit()).bytes == WRITE_BYTES
    assert [path.suffix for path in cache.iterdir()] == [""]


async def test_size_of_the_local_cache_is_bounded(url: str, tmp_path: Path) -> None:
    blobs = S3BlobStore(url, tmp_path / "one", cache_bytes=100_000, in_use_s=0)
    stored = [await store_blob(blobs, bytes([number]) * 20_000) for number in range(12)]
    assert sum(path.stat().st_size for path in (tmp_path / "one").iterdir()) <= 120_000
    assert await content(blobs, stored[0].name) == bytes(20_000)


async def test_bucket_that_cannot_be_reached_is_reported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        S3BlobStore("s3://no-such-bucket", tmp_path / "three")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=url):
        S3BlobStore(url, tmp_path / "three", retry_s=0)
