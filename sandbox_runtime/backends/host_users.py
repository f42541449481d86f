"""Which of the host's users a sandbox runs as, where the proxy is root and may choose.

The kernel counts some things for a user, whatever namespaces it is in: open files on their way
through sockets, the memory of pipes, queued signals. Sandboxes of different users do not share
these.
"""

import secrets
from pathlib import Path

NOBODY = 65534
_FIRST, _COUNT = 0x7000_0000, 0x1000_0000
"""Distributions give these uids to nobody (systemd: "UIDs and GIDs", the unused range)."""


def new_uid() -> int:
    """Return a uid of the range at random: two sandboxes rarely get the same, nobody guesses it."""
    return _FIRST + secrets.randbelow(_COUNT)


def has_range(proc: Path = Path("/proc")) -> bool:
    """Return whether the range exists here: a container's user namespace may be without it."""
    return all(_is_mapped(proc / "self" / name) for name in ("uid_map", "gid_map"))


def _is_mapped(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # no Linux
        return False
    parts = [tuple(map(int, line.split())) for line in lines]
    return any(first <= _FIRST and first + count >= _FIRST + _COUNT for first, _, count in parts)
