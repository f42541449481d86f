"""Uploaded files in a directory, by owner."""

import hashlib
from functools import partial
from pathlib import Path

from policies.file_names import guess_mime_type
from proxy.store.records import Pieces, Upload


class DirectoryUploads:
    """Finds files for the key that added them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[tuple[str, str], Upload] = {}

    def add(self, api_key: str, filename: str, data: bytes) -> str:
        """Add a file; return its id."""
        file_id = f"file-{len(self._found) + 1}"
        path = self._directory / file_id
        path.write_bytes(data)
        owner = hashlib.sha256(api_key.encode()).hexdigest()[:16]
        self._found[owner, file_id] = Upload(
            file_id, filename, len(data), guess_mime_type(filename), partial(_content, path)
        )
        return file_id

    async def find(self, owner: str, file_id: str) -> Upload | None:
        return self._found.get((owner, file_id))


async def _content(path: Path) -> Pieces:
    yield path.read_bytes()
