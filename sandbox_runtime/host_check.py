"""The doctor's check that the host has enough pseudo-terminals."""

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.kernel_limits import PSEUDO_TERMINALS
from sandbox_runtime.sandbox import Sandbox

_FILES, _DIGITS = ("max", "reserve"), 10
_TIMEOUT_S = 20.0


async def terminal_check(sandbox: Sandbox) -> Check:
    """Say for how many sandboxes the host's pseudo-terminals will do. Raises SandboxLostError."""
    files = " ".join(f"/proc/sys/kernel/pty/{name}" for name in _FILES)
    result = await sandbox.exec(f"cat {files}", timeout_s=_TIMEOUT_S, shell_state="none")
    words = [word for word in result.stdout.split() if word.isdecimal() and len(word) <= _DIGITS]
    if len(words) != len(_FILES):
        return Check("terminals", True, "pseudo-terminals are none of the host's")
    most, reserved = map(int, words)
    free = max(0, most - reserved)
    detail = (
        f"the host has {free} pseudo-terminals for all sandboxes (kernel.pty.max {most} less"
        f" kernel.pty.reserve {reserved}), of which each takes {PSEUDO_TERMINALS} at most: all that"
        f" {free // PSEUDO_TERMINALS} of them can take; then commands run on pipes"
    )
    return Check("terminals", True, detail)
