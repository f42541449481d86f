"""Files that clients have uploaded, as requests name them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded file."""

    file_id: str
    filename: str
    bytes: int
    mime_type: str
    path: Path


class Uploads(Protocol):
    """Where uploaded files are found."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        """The owner's file, or None."""


class NoUploads:
    """Where none are kept."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        return None
