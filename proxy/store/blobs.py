"""Contents: files under names of ours in one directory, there whole or not at all."""

import asyncio
import fcntl
import hashlib
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import anyio

from proxy.store.errors import StoreError
from sandbox_runtime.errors import FileMissingError

WRITE_BYTES = 1 << 20
READ_BYTES = 256 << 10
PART = ".part"
GRACE_S = 3600
"""How long a file may lie here that no row knows: it may be on its way to its row."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A content that is kept."""

    name: str
    bytes: int
    sha256: str


class Blobs:
    """A directory of contents."""

    def __init__(self, directory: Path) -> None:
        """Raises StoreError."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(str(error)) from error
        self._directory = directory

    def path(self, name: str) -> Path:
        """Where a content lies."""
        return self._directory / name

    def is_whole(self, name: str, size: int) -> bool:
        """Whether a content is there, as long as it was."""
        try:
            return self.path(name).stat().st_size == size
        except FileNotFoundError:
            return False

    async def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """A content, piece by piece. Raises FileMissingError where it is here no more."""
        try:
            source = await asyncio.to_thread(self.path(name).open, "rb")
        except FileNotFoundError as error:
            raise FileMissingError(f"the content {name} is kept no more") from error
        with source:
            while piece := await asyncio.to_thread(source.read, READ_BYTES):
                yield piece

    @asynccontextmanager
    async def new(self) -> AsyncGenerator["BlobWriter", None]:
        """A content to be written; unless it is kept, nothing is left of it."""
        name = uuid.uuid4().hex
        writer = BlobWriter(self.path(name + PART), self.path(name))
        try:
            yield writer
        finally:
            with anyio.CancelScope(shield=True):
                await writer.discard()

    async def copy(self, blob: Blob) -> Blob:
        """The same content under a name of its own, in no time. Raises FileNotFoundError."""
        name = uuid.uuid4().hex
        await asyncio.to_thread(self.path(name).hardlink_to, self.path(blob.name))
        return replace(blob, name=name)

    @asynccontextmanager
    async def claimed(self, blob: Blob) -> AsyncGenerator[None, None]:
        """While a kept content gets its row; it goes if that fails. Who is only interrupted may
        have its row: that the sweep finds out."""
        try:
            yield
        except Exception:
            await self.remove([blob.name])
            raise

    async def remove(self, names: Sequence[str]) -> None:
        """Forget contents. Who is reading one reads on."""
        if names:
            await asyncio.to_thread(self._unlink, names)

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def sweep(self, known: Mapping[str, int], now: float) -> set[str]:
        """Remove what is not known, as name and size, and say which of the known is not here.

        `known` must have been gathered before: a content is here before it has its row.
        """
        missing = set(known)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another sweep was faster
                    continue
                if known.get(entry.name) == facts.st_size:
                    missing.discard(entry.name)
                elif facts.st_ctime < now - GRACE_S and not _is_being_written(entry):
                    Path(entry.path).unlink(missing_ok=True)
        return missing


def _is_being_written(entry: "os.DirEntry[str]") -> bool:
    """Whether a process has it open to write, however slowly its content comes."""
    try:
        fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it is gone, or no file
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class BlobWriter:
    """Gathers small pieces into writes worth a thread, in which all work on the file is done."""

    def __init__(self, part: Path, path: Path) -> None:
        self._part = part
        self._path = path
        self._target: IO[bytes] | None = None
        """The file, from the first write until it is kept."""
        self._working: asyncio.Future[None] | None = None
        self._is_kept = False
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._bytes = 0

    async def take(self, piece: bytes) -> None:
        """Write a piece."""
        self._buffer += piece
        self._bytes += len(piece)
        if len(self._buffer) >= WRITE_BYTES:
            await self._work(self._write, self._taken())

    async def keep(self) -> Blob:
        """It is whole: from now on it stays."""
        await self._work(self._finish, self._taken())
        self._is_kept = True
        return Blob(self._path.name, self._bytes, self._digest.hexdigest())

    async def discard(self) -> None:
        """Remove what was not kept."""
        if self._is_kept or self._working is None:
            return
        await asyncio.wait({self._working})  # it may have been interrupted
        await asyncio.to_thread(self._remove)

    async def _work(self, work: Callable[[bytes], None], data: bytes) -> None:
        self._working = asyncio.ensure_future(asyncio.to_thread(work, data))
        await asyncio.shield(self._working)

    def _taken(self) -> bytes:
        data, self._buffer = bytes(self._buffer), bytearray()
        return data

    def _write(self, data: bytes) -> None:
        if self._target is None:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            self._target = os.fdopen(os.open(self._part, flags, 0o600), "wb")
            # For as long as it is open: no sweep takes it.
            fcntl.flock(self._target, fcntl.LOCK_EX)
        self._digest.update(data)
        self._target.write(data)

    def _finish(self, data: bytes) -> None:
        self._write(data)
        assert self._target
        self._target.close()
        self._part.rename(self._path)

    def _remove(self) -> None:
        if self._target:
            with suppress(OSError):  # what it holds back may find no room
                self._target.close()
        self._part.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
