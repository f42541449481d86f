"""What the editor can take back."""

from dataclasses import dataclass

MAX_VERSIONS_PER_PATH = 10
MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Version:
    """A file as it was before an edit."""

    path: str
    data: bytes | None
    """None where there was no file."""

    @property
    def bytes(self) -> int:
        return len(self.data or b"")


class History:
    """The last versions of the edited files, oldest first and bounded."""

    def __init__(self) -> None:
        self._versions: list[Version] = []

    def remember(self, version: Version) -> None:
        """Keep a version, and forget the oldest where there are too many.

        One path's versions stay without a gap: an undo must never skip an edit.
        """
        of_path = [known for known in self._versions if known.path == version.path]
        if version.bytes > MAX_BYTES:
            self._versions = [known for known in self._versions if known.path != version.path]
            return
        self._versions.append(version)
        if len(of_path) == MAX_VERSIONS_PER_PATH:
            self.forget(of_path[0])
        while sum(known.bytes for known in self._versions) > MAX_BYTES:
            del self._versions[0]

    def last(self, path: str) -> Version | None:
        """What the next undo of `path` brings back."""
        return next((known for known in reversed(self._versions) if known.path == path), None)

    def forget(self, version: Version) -> None:
        """Drop a version that has been brought back."""
        self._versions = [known for known in self._versions if known is not version]
