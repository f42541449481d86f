"""Isolated environments for the client programs, installed from lock files.

If an environment cannot be installed, the test is skipped, or fails if an environment variable
requires it.
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
LARGE = {
    "node-codex",
    "node-claude-code",
    "python-inspect-ai",
    "python-lm-eval",
    "python-reference-benchmark",
}
"""Environments of hundreds of MiB, which only a run with INSTALL_LARGE_STACKS installs."""


def command_of(stack: Stack) -> list[str]:
    """Return the command that runs the stack's program in its own environment."""
    if stack.language == "python":
        return [str(python_of(stack.name)), str(HERE / "python" / stack.program)]
    return node_command(stack.name, HERE / "node" / stack.program)


def node_command(name: str, program: Path) -> list[str]:
    """Return the command that runs a program with the packages of a locked Node environment."""
    node, packages = locked_node(), packages_of(name)
    # Node resolves packages, and the modules beside the program, relative to the program.
    for source in program.parent.glob("*.mjs"):
        shutil.copy(source, packages)
    return [str(node), str(packages / program.name)]


def python_of(name: str) -> Path:
    """Return the interpreter of a locked Python environment."""
    folder = KEPT / f"python-{name}"
    require_folder_or_permission(folder)
    try:
        return make_virtualenv(folder, HERE / "locks" / "python" / f"{name}.txt")
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")


def locked_node() -> Path:
    """Return Node in its locked version."""
    (node,) = packages_of("runtime").glob("node_modules/node-linux-*/bin/node")
    return node


def packages_of(name: str) -> Path:
    """Return the folder of a locked Node environment."""
    npm = shutil.which("npm")
    if npm is None:
        absent("npm is missing: Node clients are not tested", "REQUIRE_NODE")
    lock = HERE / "locks" / "node" / name
    folder = KEPT / f"node-{name}"
    require_folder_or_permission(folder)
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    files = {path.name: path.read_bytes() for path in sorted(lock.iterdir())}
    try:
        make_folder(folder, files, [npm, "ci", "--prefix", str(folder), *quiet])
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")
    return folder


def require_folder_or_permission(folder: Path) -> None:
    """Skip the test if its environment is large, is not installed, and may not be installed."""
    may_install = folder.name not in LARGE or os.environ.get("INSTALL_LARGE_STACKS")
    if not folder.exists() and not may_install:
        absent(
            f"{folder.name} is missing: INSTALL_LARGE_STACKS=1 installs it", "REQUIRE_LARGE_STACKS"
        )


def absent(why: str, demanded_by: str) -> NoReturn:
    """Skip the test, or fail it if the environment variable `demanded_by` is set."""
    if os.environ.get(demanded_by):
        pytest.fail(why)
    pytest.skip(why)


def variables(home: Path) -> dict[str, str]:
    """Return the environment variables of a client, without the developer's own settings."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        # Without this, litellm downloads its price list.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
