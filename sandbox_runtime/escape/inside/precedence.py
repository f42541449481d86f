"""Who goes first where processor or memory run short.

A kernel of the sandbox's own is wall enough: among the host's processes it is one of low standing.
"""

from __future__ import annotations

import os
from pathlib import Path


def killed_last() -> str | None:
    """Asks to outlive the host's processes where memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("-1", encoding="ascii")
    return "it is killed after the host's processes"


def priority() -> str | None:
    """Asks for more of the processor than others."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)
    return "its priority can be raised"


def realtime() -> str | None:
    """Asks to run before all others, for a moment."""
    usual = os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, usual)
    return "it can keep the processor"
