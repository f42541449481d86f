"""What a process may do because of who it is, whichever kernel it runs on."""

from __future__ import annotations

import resource
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import call, some

_ALLOWED = frozenset({0, 1, 3, 4, 5, 6, 7})
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: what installing packages takes."""
_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NEWER_SETS = frozenset({"CapAmb"})
"""Not every kernel has these."""
_GET_NO_NEW_PRIVILEGES = 39


def capabilities() -> str | None:
    """Looks for capabilities beyond those that installing packages takes."""
    status = _status()
    held: set[int] = set()
    for name in _SETS:
        bits = int(status.get(name, "0") if name in _NEWER_SETS else status[name], 16)
        held |= {bit for bit in range(bits.bit_length()) if bits >> bit & 1}
    return some("capabilities by number", sorted(held - _ALLOWED))


def new_privileges() -> str | None:
    """Looks whether a program may give it more privileges than it has."""
    return (
        None if call("prctl", _GET_NO_NEW_PRIVILEGES, 0, 0, 0, 0) else "set-user-id programs work"
    )


def core_files() -> str | None:
    """Looks whether it may write core files, which the host's program for crashes gets."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return None if 0 <= hard <= 1 else "core files are written"


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
