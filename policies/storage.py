"""What clients may keep with us: how large, how much, how long."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one key may put in, as uploads and as files of containers."""

    max_file_mib: int = 512
    """The largest single file."""
    quota_mib: int = 10240
    """All of a key's files together; what runs produce does not count."""
    keep_hours: float = 720.0
    """How long an upload lives, unless its client asked for less."""

    def expiry(self, created_at: int, asked_s: int | None) -> int:
        """When an upload ends."""
        longest_s = int(self.keep_hours * 3600)
        return created_at + (longest_s if asked_s is None else min(asked_s, longest_s))


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """How long responses and conversations are kept."""

    keep_hours: float = 720.0
    """How long after they were made, or gone on from, for the last time."""
    quota_mib: int = 1024
    """All of a key's together; beyond that those go that were used the longest ago."""

    def expiry(self, used_at: int) -> int:
        """When one ends that is not used again."""
        return used_at + int(self.keep_hours * 3600)
