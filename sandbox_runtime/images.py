"""The images and root file systems that sandboxes start from: how they are built, and the doctor's
checks, made inside a sandbox, of what an image has and of the host's pseudo-terminals."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.limits import PSEUDO_TERMINALS
from sandbox_runtime.sandbox import ExecResult, Sandbox

Target = Literal["full", "slim"]
"""Of `image/Dockerfile`: with what models compute and draw with, or without."""

BUILD = Path(__file__).parent / "image" / "build"
ROOTFS = Path(__file__).parent / "image" / "rootfs"

PROGRAMS: Mapping[str, str] = {
    "bash": "each command forgets the directory and variables of the one before",
    "tar": "workspaces cannot be saved, restored or copied",
    "python3": "no Python for the model",
    "python": "what is called by this name fails, and models do",
    "ipython": "no cells with magic",
    "uv": "Python's packages are installed by pip alone",
    "git": "no repositories",
    "curl": "nothing is fetched from the shell",
    "ps": "the model cannot see what runs",
    "unzip": "zip archives stay closed",
    "gcc": "nothing can be compiled",
    "make": "no builds",
    "ffmpeg": "no video, no sound but WAV",
    "fluidsynth": "no music from MIDI",
    "pdftotext": "PDFs cannot be read",
    "pandoc": "documents cannot be converted",
}
"""The programs that models call by name, and what is lost without each."""

MODULES: Mapping[str, str] = {
    "pip": "no packages from PyPI",
    "numpy": "no arrays",
    "scipy": "no numerical methods",
    "sympy": "no algebra",
    "mpmath": "no arbitrary precision",
    "matplotlib": "no figures",
    "pandas": "no tables",
    "statsmodels": "no statistical models",
    "PIL": "no pictures",
    "chardet": "no guess at how a text is encoded",
}
"""The Python modules that models import, and what is lost without each."""

WORKING: Mapping[str, tuple[str, str]] = {
    "ls": ("ls -ld /", "directories cannot be listed"),
    "stat": ("stat /", "files cannot be looked at"),
}
"""Programs that may be there and fail all the same, with a command that tries each: runsc has
refused a flag of the system call behind them."""
_CURE = "if this is runsc, take a newer one or an image of `sandbox-proxy build-image`"

FILES: Mapping[str, tuple[str, str]] = {
    "certificates": (
        "https cannot be verified",
        "/etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem",
    ),
    "fonts": (
        "no text in pictures and PDFs",
        "/usr/share/fonts/*.[ot]t[cf] /usr/share/fonts/*/*.[ot]t[cf]"
        " /usr/share/fonts/*/*/*.[ot]t[cf]",
    ),
}
"""The files that programs look for, with the places of which one is enough."""

REQUIRED = frozenset({"image", "image bash", "image tar"})
"""The findings that the sandbox's own promises need; only a model may miss the rest."""

_TIMEOUT_S = 20.0
_PTY_FILES, _MAX_PTY_DIGITS = ("max", "reserve"), 10


def build_image(target: Target, tag: str, *options: str) -> int:
    """Build a target with Docker's command line and tag it; return the exit code of `docker build`.

    `options` are passed on, such as `--build-arg CA_CERTIFICATES=…`. The output goes to standard
    output and standard error as it comes.
    """
    return subprocess.run(["sh", BUILD, target, tag, *options], check=False).returncode


def build_rootfs(tar: Path) -> int:
    """Make a tar of Debian's packages that bubblewrap's sandboxes can start from: Python with
    numpy, scipy and sympy; return the exit code of `mmdebstrap`."""
    return subprocess.run(["sh", ROOTFS, tar], check=False).returncode


async def image_checks(sandbox: Sandbox) -> list[Check]:
    """Return one finding that lists what the image has, and one for each thing that it lacks.

    Raises SandboxLostError.
    """
    result = await sandbox.exec(_probe(), timeout_s=_TIMEOUT_S, shell_state="none")
    if result.exit_code != 0:
        said = (result.stderr.splitlines() or ["nothing"])[-1][:200]
        return [Check("image", False, f"cannot be looked at, the shell says {said!r}")]
    inside = _inside(result)
    losses = {name: f"missing: {loss}" for name, loss in {**PROGRAMS, **MODULES}.items()}
    losses |= {name: f"missing: {loss}" for name, (loss, _) in FILES.items()}
    losses |= {name: f"fails: {loss}; {_CURE}" for name, (_, loss) in WORKING.items()}
    there = ", ".join(name for name in losses if name in inside)
    return [
        Check("image", True, f"has {there or 'nothing that models reach for'}"),
        *(
            Check(f"image {name}", False, loss)
            for name, loss in losses.items()
            if name not in inside
        ),
    ]


async def installed(sandbox: Sandbox) -> tuple[str, ...]:
    """Return the names in PROGRAMS and MODULES that the image has. Raises SandboxLostError."""
    inside = _inside(await sandbox.exec(_probe(), timeout_s=_TIMEOUT_S, shell_state="none"))
    return tuple(name for name in (*PROGRAMS, *MODULES) if name in inside)


def _inside(result: ExecResult) -> set[str]:
    # Lines from inside are compared, never shown: they may be made for a terminal.
    return set(result.stdout.splitlines())


def _probe() -> str:
    """Return a script for any POSIX shell that prints the names of what the image has."""
    steps = [
        f"for name in {' '.join(PROGRAMS)}; do"
        ' command -v "$name" >/dev/null 2>&1 && echo "$name"; done'
    ]
    steps += [f"{command} >/dev/null 2>&1 && echo {name}" for name, (command, _) in WORKING.items()]
    steps += [
        f'for file in {places}; do [ -s "$file" ] && echo {name} && break; done'
        for name, (_, places) in FILES.items()
    ]
    modules = (
        "import importlib.util as u;"
        f"[print(name) for name in {tuple(MODULES)!r} if u.find_spec(name)]"
    )
    steps.append(f'python3 -I -c "{modules}" 2>/dev/null')
    return "\n".join([*steps, "true"])


async def terminal_check(sandbox: Sandbox) -> Check:
    """Report how many sandboxes the host's pseudo-terminals are enough for.

    Raises SandboxLostError.
    """
    files = " ".join(f"/proc/sys/kernel/pty/{name}" for name in _PTY_FILES)
    result = await sandbox.exec(f"cat {files}", timeout_s=_TIMEOUT_S, shell_state="none")
    words = result.stdout.split()
    numbers = [word for word in words if word.isdecimal() and len(word) <= _MAX_PTY_DIGITS]
    if len(numbers) != len(_PTY_FILES):
        return Check("terminals", True, "pseudo-terminals are none of the host's")
    most, reserved = map(int, numbers)
    free = max(0, most - reserved)
    detail = (
        f"the host has {free} pseudo-terminals for all sandboxes (kernel.pty.max {most} less"
        f" kernel.pty.reserve {reserved}), of which each takes {PSEUDO_TERMINALS} at most: all that"
        f" {free // PSEUDO_TERMINALS} of them can take; then commands run on pipes"
    )
    return Check("terminals", True, detail)
