"""Virtualenvs of peers, created in the user's cache and reused."""

import os
import subprocess
import sys
from pathlib import Path

INSTALL_TIMEOUT_S = 900


class PeerMissingError(Exception):
    """A peer cannot be installed or run on this machine."""


def peer_python(name: str, *requirements: str) -> Path:
    """Return the interpreter of a virtualenv with these packages. Raises PeerMissingError if they
    cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "llm-sandbox-proxy" / f"bench-{name}"
    python, complete = directory / "bin" / "python", directory / "complete"
    wanted = "\n".join(requirements)
    if not complete.exists() or complete.read_text() != wanted:
        sys.stderr.write(f"installing {', '.join(requirements)} into {directory}\n")
        _run(sys.executable, "-m", "venv", str(directory))
        _run(str(python), "-m", "pip", "install", "--quiet", *requirements)
        complete.write_text(wanted)
    return python


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").split("\n")
        why = next((line for line in lines if line.startswith("ERROR")), f"exit {error.returncode}")
        raise PeerMissingError(why[:200]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(str(error)[:200]) from error
