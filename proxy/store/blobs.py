"""Contents: files under names of ours in one directory, there whole or not at all."""

import asyncio
import fcntl
import hashlib
import os
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

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

    @contextmanager
    def new(self) -> Iterator["BlobWriter"]:
        """A content to be written; unless it is kept, nothing is left of it."""
        name = uuid.uuid4().hex
        part = self.path(name + PART)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # for as long as it is open: no sweep takes it
        try:
            with os.fdopen(fd, "wb") as target:
                yield BlobWriter(target, part, self.path(name))
        finally:
            part.unlink(missing_ok=True)

    def copy(self, blob: Blob) -> Blob:
        """The same content under a name of its own, in no time. Raises FileNotFoundError."""
        name = uuid.uuid4().hex
        self.path(name).hardlink_to(self.path(blob.name))
        return replace(blob, name=name)

    @contextmanager
    def claimed(self, blob: Blob) -> Iterator[None]:
        """While a kept content gets its row; it goes if that fails. Who is only interrupted may
        have its row: that the sweep finds out."""
        try:
            yield
        except Exception:
            self.remove([blob.name])
            raise

    def remove(self, names: Iterable[str]) -> None:
        """Forget contents. Who is reading one reads on."""
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
    """Gathers small pieces into writes worth a thread."""

    def __init__(self, target: IO[bytes], part: Path, path: Path) -> None:
        self._target = target
        self._part = part
        self._path = path
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._bytes = 0

    async def take(self, piece: bytes) -> None:
        """Write a piece."""
        self._buffer += piece
        self._bytes += len(piece)
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def keep(self) -> Blob:
        """It is whole: from now on it stays."""
        await self._flush()
        self._target.close()
        self._part.rename(self._path)
        return Blob(self._path.name, self._bytes, self._digest.hexdigest())

    async def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._target.write(data)
