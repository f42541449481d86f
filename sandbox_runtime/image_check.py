"""What an image lacks of what models reach for, seen from inside a sandbox of it."""

from collections.abc import Mapping

from sandbox_runtime.backends.base import Check
from sandbox_runtime.sandbox import ExecResult, Sandbox

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
"""What a model calls by name, and what is lost without it."""

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
"""What its Python imports."""

WORKING: Mapping[str, tuple[str, str]] = {
    "ls": ("ls -ld /", "directories cannot be listed"),
    "stat": ("stat /", "files cannot be looked at"),
}
"""What is there and may fail all the same, with how it is tried: runsc has refused a flag of the
system call behind them."""
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
"""What programs look for, with the places of which one is enough."""

REQUIRED = frozenset({"image", "image bash", "image tar"})
"""The findings that the sandbox's own promises stand on; the rest only a model may miss."""

TIMEOUT_S = 20.0


async def image_checks(sandbox: Sandbox) -> list[Check]:
    """What is there in one line, and a line for each thing that is not.

    Raises SandboxLostError.
    """
    result = await sandbox.exec(_probe(), timeout_s=TIMEOUT_S, shell_state="none")
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
    """Those programs and modules that models reach for and find. Raises SandboxLostError."""
    inside = _inside(await sandbox.exec(_probe(), timeout_s=TIMEOUT_S, shell_state="none"))
    return tuple(name for name in (*PROGRAMS, *MODULES) if name in inside)


def _inside(result: ExecResult) -> set[str]:
    # Lines from inside are compared, never shown: they may be made for a terminal.
    return set(result.stdout.splitlines())


def _probe() -> str:
    """A script for any POSIX shell that prints the names of what is there."""
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
