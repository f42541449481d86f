"""Blobs in an S3 bucket, for the servers of several machines, with a cache of files on the local
disk."""

import asyncio
import os
import re
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from proxy.errors import StoreError, StoreUnavailableError
from proxy.store.blobs import GRACE_S, PART_SUFFIX, Blob, BlobStore, BlobWriter

CACHE_BYTES = 4 << 30
"""Maximum size of the cache, in bytes. Above it, the least recently used files are removed until
the cache has half of this size."""
IN_USE_S = 60
"""Seconds after its last use for which a file stays in the cache, because a response may be about
to open it."""
CONNECT_TIMEOUT_S = 5
TIMEOUT_S = 600
"""Maximum duration of one request to the bucket, in seconds: a blob may have a gigabyte."""
RETRY_S = 15
"""Seconds for which a failed request is repeated."""
_NAME = re.compile("[0-9a-f]{32}")
"""Matches a blob's name. A sweep does not remove objects with other names."""


class S3BlobStore(BlobStore):
    """The blobs below a prefix of a bucket. The bucket's credentials, its endpoint and its region
    come from the environment variables of AWS's own tools."""

    def __init__(
        self,
        url: str,
        cache_directory: Path,
        *,
        cache_bytes: int = CACHE_BYTES,
        in_use_s: float = IN_USE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`url` is s3://BUCKET or s3://BUCKET/PREFIX. Raises StoreError if the bucket's objects
        cannot be listed."""
        super().__init__(cache_directory)
        self._cache = _Cache(cache_directory, cache_bytes, in_use_s)
        self._bucket = _open_bucket(url, retry_s)
        try:
            with _translate_errors():
                next(iter(obstore.list(self._bucket, chunk_size=1)), None)
        except (FileNotFoundError, StoreUnavailableError) as error:
            raise StoreError(f"{url}: {error.__cause__ or error}") from error

    def open(self, name: str) -> IO[bytes]:
        return self._fetch(name).open("rb")

    async def local_path(self, name: str) -> Path:
        try:
            return await asyncio.to_thread(self._fetch, name)
        except FileNotFoundError:
            return self.path(name)

    def is_intact(self, name: str, size: int) -> bool:
        with _translate_errors():
            return self._object_size(name) == size

    @asynccontextmanager
    async def open_writer(self) -> AsyncGenerator[BlobWriter, None]:
        name = uuid.uuid4().hex
        writer = _UploadingWriter(self.path(name + PART_SUFFIX), self.path(name), self._upload)
        async with self._discard_at_exit(writer):
            yield writer

    async def copy(self, blob: Blob) -> Blob:
        name = uuid.uuid4().hex
        with _translate_errors():
            await obstore.copy_async(self._bucket, blob.name, name)
        return replace(blob, name=name)

    def sweep(self, known_sizes: Mapping[str, int], now: float) -> set[str]:
        missing, unknown = set(known_sizes), []
        with _translate_errors():
            for batch in obstore.list(self._bucket):
                for found in batch:
                    name, is_old = found["path"], found["last_modified"].timestamp() < now - GRACE_S
                    if known_sizes.get(name) == found["size"]:
                        missing.discard(name)
                    elif is_old and _NAME.fullmatch(name):
                        unknown.append(name)
            if unknown:
                obstore.delete(self._bucket, unknown)
        self._remove_old_parts(now)
        return missing

    def _unlink(self, names: Sequence[str]) -> None:
        super()._unlink(names)
        with _translate_errors():
            obstore.delete(self._bucket, list(names))

    def _fetch(self, name: str) -> Path:
        """Return the path of a blob's file in the cache, after a download if necessary. Blocks.
        Raises FileNotFoundError, StoreUnavailableError."""
        path = self.path(name)
        if self._cache.touch(path):
            return path
        part = path.with_name(f"{name}.{uuid.uuid4().hex}{PART_SUFFIX}")
        try:
            with _translate_errors():
                found = obstore.get(self._bucket, name)
                self._cache.count_new_file(found.meta["size"])
                with part.open("xb") as target:
                    for piece in found.stream():
                        target.write(piece)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def _upload(self, path: Path) -> None:
        """Upload a file under its own name. Blocks. Raises StoreUnavailableError."""
        with _translate_errors():
            obstore.put(self._bucket, path.name, path)
        self._cache.count_new_file(path.stat().st_size)

    def _object_size(self, name: str) -> int | None:
        """Return the size of an object, or None if it does not exist. Blocks."""
        try:
            return obstore.head(self._bucket, name)["size"]
        except FileNotFoundError:
            return None


class _UploadingWriter(BlobWriter):
    """Writes a file, and uploads it when the blob is complete. The file stays in the cache."""

    def __init__(self, part_path: Path, path: Path, upload: Callable[[Path], None]) -> None:
        super().__init__(part_path, path)
        self._upload = upload

    def _finish(self, data: bytes) -> None:
        super()._finish(data)
        self._upload(self._path)


class _Cache:
    """The files of a directory. If they become too large, the least recently used files are
    removed."""

    def __init__(self, directory: Path, max_bytes: int, in_use_s: float) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._in_use_s = in_use_s
        self._lock = threading.Lock()
        self._unseen_bytes = max_bytes
        """The number of bytes that were added since the last listing of the files."""

    def touch(self, path: Path) -> bool:
        """Mark a file as used now. Return False if it is not in the cache."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def count_new_file(self, size: int) -> None:
        """Count `size` bytes of a new file. Once the new files have a sixteenth of the maximum
        size, shrink the cache if it is too large."""
        with self._lock:
            self._unseen_bytes += size
            if self._unseen_bytes > self._max_bytes // 16:
                self._shrink()

    def _shrink(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files) + self._unseen_bytes
        self._unseen_bytes = 0
        if total > self._max_bytes:
            latest = files[-1][0] if files else 0.0
            for used, size, path in files:
                if total <= self._max_bytes // 2 or used > latest - self._in_use_s:
                    break
                path.unlink(missing_ok=True)
                total -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of the last use, the size and the path of each file."""
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # removed meanwhile
                status = path.stat()
                yield status.st_mtime, status.st_size, path


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise StoreUnavailableError for the errors of the bucket, except for FileNotFoundError."""
    try:
        yield
    except BaseError as error:
        raise StoreUnavailableError from error


def _open_bucket(url: str, retry_s: float) -> S3Store:
    return S3Store.from_url(
        url,
        client_options={
            "allow_http": True,  # an endpoint inside the cluster
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=TIMEOUT_S),
        },
        retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=retry_s)},
    )
