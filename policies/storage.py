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
