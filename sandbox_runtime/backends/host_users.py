"""Which of the host's users a sandbox runs as, where the proxy is root and may choose.

The kernel counts some things for a user, whatever namespaces it is in: open files on their way
through sockets, the memory of pipes, queued signals. Sandboxes of different users do not share
these.
"""

import secrets
from pathlib import Path

NOBODY = 65534
UIDS = range(0x7800_0000, 0x7FFE_0000)
"""Of the range that distributions leave unused (systemd's "UIDs and GIDs"), what lies above those
that SSSD gives to users of an Active Directory and below systemd's own for foreign images."""


def new_uid() -> int:
    """Return a uid of the range at random: two sandboxes rarely get the same, nobody guesses it."""
    return secrets.choice(UIDS)


def has_range(proc: Path = Path("/proc")) -> bool:
    """Return whether the range exists here: a container's user namespace may be without it."""
    return all(_is_mapped(proc / "self" / name) for name in ("uid_map", "gid_map"))


def _is_mapped(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # no Linux
        return False
    parts = [tuple(map(int, line.split())) for line in lines]
    return any(first <= UIDS.start and first + count >= UIDS.stop for first, _, count in parts)
