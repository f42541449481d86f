"""Where clients live: an environment for each, made from its lock.

Where one cannot be had the test is skipped, or fails if told to.
"""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.clients.locked_packages import MissingError, make_folder, make_virtualenv
from tests.clients.stacks.stacks import Stack

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
KEPT = ROOT / ".stacks"


def command_of(stack: Stack) -> list[str]:
    """How to run its program, in its own environment."""
    if stack.language == "python":
        return [str(python_of(stack.name)), str(HERE / "python" / stack.program)]
    runtime, packages = _packages("runtime"), _packages(stack.name)
    # The version of Node is locked as well.
    (node,) = runtime.glob("node_modules/node-linux-*/bin/node")
    # It looks for packages beside the program.
    for source in (HERE / "node").glob("*.mjs"):
        shutil.copy(source, packages)
    return [str(node), str(packages / stack.program)]


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    try:
        return make_virtualenv(KEPT / f"python-{name}", HERE / "locks" / "python" / f"{name}.txt")
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")


def _packages(name: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        absent("npm is missing: clients in Node are not tried", "REQUIRE_NODE")
    lock = HERE / "locks" / "node" / name
    folder = KEPT / f"node-{name}"
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    files = {path.name: path.read_bytes() for path in sorted(lock.iterdir())}
    try:
        make_folder(folder, files, [npm, "ci", "--prefix", str(folder), *quiet])
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")
    return folder


def absent(why: str, demanded_by: str) -> NoReturn:
    """Skip the test; where that environment variable is set it fails."""
    if os.environ.get(demanded_by):
        pytest.fail(why)
    pytest.skip(why)


def variables(home: Path) -> dict[str, str]:
    """A client's environment variables: nothing of the developer's own settings."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        # Else litellm asks the internet for prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
