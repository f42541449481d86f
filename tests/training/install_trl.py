"""Install PyTorch, TRL and the proxy's own dependencies into the user's cache.

`python -m tests.training.install_trl` creates a virtual environment (1.5 GB) and prints its
interpreter. An environment that is already in the cache is not created again. Run the interpreter
in the root of the repository, whose packages it imports.
"""

import hashlib
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.clients.stacks.environments import absent
from tests.engines.installation import NotInstalledError, build_folder, cache_folder, report, run

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""A release without CUDA, if pip is configured with an index or a folder that has it."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The interpreter of an environment with TRL."""

    python: Path


def requirements() -> list[str]:
    """Return the requirements of the project with the extras `training` and `trl`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [TORCH, *project["dependencies"], *extras["training"], *extras["trl"]]


def directory() -> Path:
    """Return the cache folder of these requirements."""
    digest = hashlib.sha256("\n".join(requirements()).encode()).hexdigest()
    return cache_folder(f"trl-{digest[:12]}")


def find_installation() -> Installation:
    """Return the path in the cache. Raise NotInstalledError."""
    if not directory().exists():
        raise NotInstalledError(f"no TRL: {directory()} missing; `make train-demo` installs it")
    return Installation(directory() / "environment/bin/python")


def install() -> None:
    """Create the environment if it is missing. Raise CalledProcessError or TimeoutExpired."""
    if directory().exists():
        return
    with build_folder(directory()) as made:
        # The environment's scripts contain its build path, so only the interpreter is used.
        python = str(made / "environment/bin/python")
        run([sys.executable, "-m", "venv", str(made / "environment")])
        run([python, "-m", "pip", "install", "--quiet", TORCH])
        run([python, "-m", "pip", "install", "--quiet", *requirements()])


def run_python(*arguments: str) -> bytes:
    """Return the output of the installed interpreter. Skip the test if there is none, or fail it if
    REQUIRE_TRL is set.
    """
    try:
        python = find_installation().python
    except NotInstalledError as error:
        absent(str(error), "REQUIRE_TRL")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout


if __name__ == "__main__":
    sys.exit(report(install, find_installation))
