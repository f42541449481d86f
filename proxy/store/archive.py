"""Several contents as one zip, made while it is read."""

import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from policies.workspace import ArchiveNames
from proxy.store.records import ContainerFile

READ_BYTES = 1 << 20


class _Outlet:
    """What the archive writes into; it can only go forward."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held open."""

    def take(self) -> bytes:
        """What was written since the last time."""
        data, self._pieces = b"".join(self._pieces), []
        return data


def zipped(files: Iterable[tuple[ContainerFile, Path]]) -> Iterator[bytes]:
    """The archive, piece by piece; each file with the place where its content lies."""
    outlet, names = _Outlet(), ArchiveNames()
    with zipfile.ZipFile(outlet, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, path in files:
            info = zipfile.ZipInfo(names.give(file.path), time.gmtime(file.created_at)[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.file_size = file.bytes  # decides whether it needs the large format
            info.external_attr = 0o644 << 16
            with path.open("rb") as source, archive.open(info, "w") as target:
                while piece := source.read(READ_BYTES):
                    target.write(piece)
                    yield outlet.take()
    yield outlet.take()
