"""The images and root file systems of sandboxes: the commands that build them, the list of an
image's programs, and two checks of `doctor` that run inside a sandbox, for these programs and for
the host's pseudo-terminals."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.limits import PSEUDO_TERMINALS
from sandbox_runtime.sandbox import ExecResult, Sandbox

Target = Literal["full", "slim"]
"""A target of `image/Dockerfile`: with or without the programs for computing and plotting."""

BUILD = Path(__file__).parent / "image" / "build"
ROOTFS = Path(__file__).parent / "image" / "rootfs"

PROGRAMS: Mapping[str, str] = {
    "bash": "commands do not keep the directory and variables of the previous one",
    "tar": "workspaces cannot be saved or restored",
    "python3": "no Python for the model",
    "python": "models often call Python by this name",
    "ipython": "no IPython cells",
    "uv": "Python packages can only be installed with pip",
    "git": "no repositories",
    "curl": "nothing can be downloaded from the shell",
    "ps": "the model cannot list processes",
    "unzip": "zip archives cannot be unpacked",
    "gcc": "C programs cannot be compiled",
    "make": "no builds",
    "ffmpeg": "no video, and no audio except WAV",
    "fluidsynth": "no music from MIDI",
    "pdftotext": "PDFs cannot be read",
    "pandoc": "documents cannot be converted",
}
"""The programs that models call by name, and what is missing without each."""

MODULES: Mapping[str, str] = {
    "pip": "no packages from PyPI",
    "numpy": "no arrays",
    "scipy": "no numerical methods",
    "sympy": "no algebra",
    "mpmath": "no arbitrary precision",
    "matplotlib": "no figures",
    "pandas": "no tables",
    "statsmodels": "no statistical models",
    "PIL": "no images",
    "chardet": "encodings of text files cannot be detected",
}
"""The Python modules that models import, and what is missing without each."""

TESTED_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "ls": ("ls -ld /", "directories cannot be listed"),
    "stat": ("stat /", "file metadata cannot be read"),
}
"""Programs that may be installed and still fail, because old versions of runsc refuse a flag of a
system call that they use. Each has a test command, and the feature that is lost if it fails."""
_REMEDY = "on runsc use a newer version, or an image of `sandbox-proxy build-image`"

FILES: Mapping[str, tuple[str, str]] = {
    "certificates": (
        "https cannot be verified",
        "/etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem",
    ),
    "fonts": (
        "no text in images and PDFs",
        "/usr/share/fonts/*.[ot]t[cf] /usr/share/fonts/*/*.[ot]t[cf]"
        " /usr/share/fonts/*/*/*.[ot]t[cf]",
    ),
}
"""Files that programs need: the feature that is lost without them, and their alternative paths."""

REQUIRED = frozenset({"image", "image bash", "image tar"})
"""The names of the checks of `image_checks` that sandboxes require. If another one fails, the
model can do less."""

_TIMEOUT_S = 20.0
_PTY_FILES, _MAX_PTY_DIGITS = ("max", "reserve"), 10


def build_image(target: Target, tag: str, *options: str) -> int:
    """Build a target with Docker's command line and tag it; return the exit code of `docker build`.

    `options` are passed on, such as `--build-arg CA_CERTIFICATES=…`. The output of the build goes
    to standard output and standard error.
    """
    return subprocess.run(["sh", BUILD, target, tag, *options], check=False).returncode


def build_rootfs(tar_path: Path) -> int:
    """Build a tar archive of a Debian root file system for bubblewrap, which has Python with numpy,
    scipy and sympy; return the exit code of `mmdebstrap`."""
    return subprocess.run(["sh", ROOTFS, tar_path], check=False).returncode


async def image_checks(sandbox: Sandbox) -> list[Check]:
    """Return a check that lists what the image has, and a failed check for each program, module and
    file that it lacks. If the image cannot be inspected, return one failed check.

    Raises SandboxLostError.
    """
    result = await sandbox.exec(_probe_script(), timeout_s=_TIMEOUT_S, shell_state="none")
    if result.exit_code != 0:
        reason = (result.stderr.splitlines() or ["nothing"])[-1][:200]
        return [Check("image", False, f"cannot be inspected: the shell failed with {reason!r}")]
    found = _printed_names(result)
    lost_features = {name: f"missing: {loss}" for name, loss in {**PROGRAMS, **MODULES}.items()}
    lost_features |= {name: f"missing: {loss}" for name, (loss, _) in FILES.items()}
    lost_features |= {
        name: f"fails: {loss}; {_REMEDY}" for name, (_, loss) in TESTED_PROGRAMS.items()
    }
    present = ", ".join(name for name in lost_features if name in found)
    return [
        Check("image", True, f"has {present or 'none of the programs that models use'}"),
        *(
            Check(f"image {name}", False, loss)
            for name, loss in lost_features.items()
            if name not in found
        ),
    ]


async def installed_programs(sandbox: Sandbox) -> tuple[str, ...]:
    """Return the names in PROGRAMS and MODULES that the image has. Raises SandboxLostError."""
    result = await sandbox.exec(_probe_script(), timeout_s=_TIMEOUT_S, shell_state="none")
    found = _printed_names(result)
    return tuple(name for name in (*PROGRAMS, *MODULES) if name in found)


def _printed_names(result: ExecResult) -> set[str]:
    # Lines from inside are only compared, never shown: they may contain terminal escape sequences.
    return set(result.stdout.splitlines())


def _probe_script() -> str:
    """Return a POSIX shell script that prints the name of each program, module and kind of file
    that the image has."""
    steps = [
        f"for name in {' '.join(PROGRAMS)}; do"
        ' command -v "$name" >/dev/null 2>&1 && echo "$name"; done'
    ]
    steps += [
        f"{command} >/dev/null 2>&1 && echo {name}"
        for name, (command, _) in TESTED_PROGRAMS.items()
    ]
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
    """Return a check whose text says for how many sandboxes the host's pseudo-terminals are enough.

    Raises SandboxLostError.
    """
    files = " ".join(f"/proc/sys/kernel/pty/{name}" for name in _PTY_FILES)
    result = await sandbox.exec(f"cat {files}", timeout_s=_TIMEOUT_S, shell_state="none")
    words = result.stdout.split()
    numbers = [word for word in words if word.isdecimal() and len(word) <= _MAX_PTY_DIGITS]
    if len(numbers) != len(_PTY_FILES):
        return Check("terminals", True, "the sandbox has pseudo-terminals of its own")
    maximum, reserved = map(int, numbers)
    free = max(0, maximum - reserved)
    detail = (
        f"the host has {free} pseudo-terminals for all sandboxes (kernel.pty.max {maximum} less"
        f" kernel.pty.reserve {reserved}); each sandbox uses up to {PSEUDO_TERMINALS}, so they are"
        f" enough for {free // PSEUDO_TERMINALS}; beyond that, commands run on pipes"
    )
    return Check("terminals", True, detail)
