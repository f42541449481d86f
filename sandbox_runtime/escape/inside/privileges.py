"""Attempts to use more privileges: capabilities, set-user-id programs, priority over the host."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import call, summarize

_ALLOWED = frozenset({0, 1, 3, 4, 5, 6, 7})
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: installing packages needs them."""
_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NEWER_SETS = frozenset({"CapAmb"})
"""Sets of capabilities that old kernels lack."""
_GET_NO_NEW_PRIVILEGES = 39


def killed_last() -> str | None:
    """Asks to be killed after the host's processes when memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("-1", encoding="ascii")
    return "it is killed after the host's processes"


def priority() -> str | None:
    """Asks for a higher CPU priority than others."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)
    return "its priority can be raised"


def realtime() -> str | None:
    """Asks for realtime priority for a moment."""
    usual = os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, usual)
    return "it can keep the processor"


def capabilities() -> str | None:
    """Looks for capabilities beyond those that installing packages needs."""
    status = _status()
    held: set[int] = set()
    for name in _SETS:
        bits = int(status.get(name, "0") if name in _NEWER_SETS else status[name], 16)
        held |= {bit for bit in range(bits.bit_length()) if bits >> bit & 1}
    return summarize("capabilities by number", sorted(held - _ALLOWED))


def new_privileges() -> str | None:
    """Checks whether set-user-id programs may give the process more privileges."""
    return (
        None if call("prctl", _GET_NO_NEW_PRIVILEGES, 0, 0, 0, 0) else "set-user-id programs work"
    )


def core_files() -> str | None:
    """Checks whether the process may write core files, which the host's crash handler would
    receive."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return None if 0 <= hard <= 1 else "core files are written"


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
