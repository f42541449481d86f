"""Blobs: files with random names in one directory. Each blob exists completely or not at all."""

import asyncio
import fcntl
import hashlib
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import anyio

from proxy.errors import StoreError
from sandbox_runtime.errors import FileMissingError

WRITE_BYTES = 1 << 20
READ_BYTES = 256 << 10
PART_SUFFIX = ".part"
GRACE_S = 3600
"""Seconds that a blob without a row stays, because the row may still be written."""


@dataclass(frozen=True, slots=True)
class Blob:
    """The name, the size in bytes and the hash of a complete blob."""

    name: str
    bytes: int
    sha256: str


class BlobStore:
    """Stores blobs as files in one directory."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if it is missing. Raises StoreError."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(str(error)) from error
        self._directory = directory

    def path(self, name: str) -> Path:
        """Return the path that a blob has in the directory."""
        return self._directory / name

    def open(self, name: str) -> IO[bytes]:
        """Open a blob for reading. Blocks. Raises FileNotFoundError, StoreUnavailableError."""
        return self.path(name).open("rb")

    async def local_path(self, name: str) -> Path:
        """Return the path of a local file with the content of a blob. If the blob is missing, no
        file is at the path. Raises StoreUnavailableError."""
        return self.path(name)

    def is_intact(self, name: str, size: int) -> bool:
        """Return True if a blob exists and has this size in bytes."""
        try:
            return self.path(name).stat().st_size == size
        except FileNotFoundError:
            return False

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield a blob piece by piece. Raises FileMissingError if it does not exist,
        StoreUnavailableError."""
        try:
            source = await asyncio.to_thread(self.open, name)
        except FileNotFoundError as error:
            raise FileMissingError("the file is no longer stored") from error
        with source:
            while piece := await asyncio.to_thread(source.read, READ_BYTES):
                yield piece

    @asynccontextmanager
    async def open_writer(self) -> AsyncGenerator["BlobWriter", None]:
        """Open a new blob for writing. The blob is removed at the end of the block unless the
        writer commits it."""
        name = uuid.uuid4().hex
        writer = BlobWriter(self.path(name + PART_SUFFIX), self.path(name))
        async with self._discard_at_exit(writer):
            yield writer

    @asynccontextmanager
    async def _discard_at_exit(self, writer: "BlobWriter") -> AsyncGenerator[None, None]:
        """Discard the writer at the end of the block."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await writer.discard()

    async def copy(self, blob: Blob) -> Blob:
        """Link a blob under another name and return the copy. Raises FileNotFoundError if the blob
        does not exist."""
        name = uuid.uuid4().hex
        await asyncio.to_thread(self.path(name).hardlink_to, self.path(blob.name))
        return replace(blob, name=name)

    @asynccontextmanager
    async def remove_on_error(self, blob: Blob) -> AsyncGenerator[None, None]:
        """Remove the blob if the block, which writes the blob's row, raises an exception.

        After a cancellation the blob stays, because its row may have been written. A sweep removes
        the blob if it has no row.
        """
        try:
            yield
        except Exception:
            await self.remove([blob.name])
            raise

    async def remove(self, names: Sequence[str]) -> None:
        """Remove blobs. A reader that has opened a removed blob can still read to its end."""
        if names:
            await asyncio.to_thread(self._unlink, names)

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def sweep(self, known_sizes: Mapping[str, int], now: float) -> set[str]:
        """Remove each file whose name and size are not in `known_sizes`, unless it is newer than
        `GRACE_S` or is being written. Return the names in `known_sizes` without an intact file.

        A blob is written before its row, and the rows are read before the files are listed. So a
        name in `known_sizes` without a file is a lost blob, not one that is still being written.
        """
        missing = set(known_sizes)
        for entry, status in self._entries():
            if known_sizes.get(entry.name) == status.st_size:
                missing.discard(entry.name)
            else:
                _remove_if_old(entry, status, now)
        return missing

    def _remove_old_parts(self, now: float) -> None:
        """Remove the unfinished files of dead processes, unless they are newer than `GRACE_S`."""
        for entry, status in self._entries():
            if entry.name.endswith(PART_SUFFIX):
                _remove_if_old(entry, status, now)

    def _entries(self) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process sweeps, too
                    yield entry, entry.stat(follow_symlinks=False)


def _remove_if_old(entry: "os.DirEntry[str]", status: os.stat_result, now: float) -> None:
    """Remove a file, unless it is newer than `GRACE_S` or is being written."""
    if status.st_ctime < now - GRACE_S and not _is_being_written(entry):
        Path(entry.path).unlink(missing_ok=True)


def _is_being_written(entry: "os.DirEntry[str]") -> bool:
    """Return True if a process has the file open for writing."""
    try:
        fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone, or not a file
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class BlobWriter:
    """Writes one blob in a thread. Small pieces are collected into larger writes."""

    def __init__(self, part_path: Path, path: Path) -> None:
        self._part_path = part_path
        self._path = path
        self._file: IO[bytes] | None = None
        """The open file; None until the first piece is written."""
        self._thread_call: asyncio.Future[None] | None = None
        self._is_committed = False
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._bytes = 0

    async def write(self, piece: bytes) -> None:
        self._buffer += piece
        self._bytes += len(piece)
        if len(self._buffer) >= WRITE_BYTES:
            await self._run_in_thread(self._append, self._flush_buffer())

    async def commit(self) -> Blob:
        """Complete the blob and return it."""
        await self._run_in_thread(self._finish, self._flush_buffer())
        self._is_committed = True
        return Blob(self._path.name, self._bytes, self._digest.hexdigest())

    async def discard(self) -> None:
        """Remove the file unless the blob is committed."""
        if self._is_committed or self._thread_call is None:
            return
        await asyncio.wait({self._thread_call})  # a cancelled `write` leaves its thread running
        await asyncio.to_thread(self._remove)

    async def _run_in_thread(self, work: Callable[[bytes], None], data: bytes) -> None:
        self._thread_call = asyncio.ensure_future(asyncio.to_thread(work, data))
        await asyncio.shield(self._thread_call)

    def _flush_buffer(self) -> bytes:
        data, self._buffer = bytes(self._buffer), bytearray()
        return data

    def _append(self, data: bytes) -> None:
        if self._file is None:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._part_path, flags, 0o600), "wb")
            # The lock, which the file holds while it is open, makes sweeps skip the file.
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._digest.update(data)
        self._file.write(data)

    def _finish(self, data: bytes) -> None:
        self._append(data)
        assert self._file
        self._file.close()
        self._part_path.rename(self._path)

    def _remove(self) -> None:
        if self._file:
            with suppress(OSError):  # the disk may be too full to flush the buffer
                self._file.close()
        self._part_path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
