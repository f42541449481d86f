"""Where clients live: an environment for each, made from its lock, kept while the lock stays.

Where one cannot be had the test is skipped, or fails if told to.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import uv

from tests.clients.stacks.stacks import Stack

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
KEPT = ROOT / ".stacks"
INSTALL_TIMEOUT_S = 300


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


TRUSTED = Path("/etc/ssl/certs/ca-certificates.crt")
TRUST = {"NODE_EXTRA_CA_CERTS": str(TRUSTED)} if TRUSTED.exists() else {}
"""What makes npm trust whom this host trusts, as pip and uv do."""


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    lock = HERE / "locks" / "python" / f"{name}.txt"
    folder = KEPT / f"python-{name}"
    tool = uv.find_uv_bin()
    _make(
        folder,
        {lock.name: lock.read_bytes(), "made-by": sys.version.encode()},
        [tool, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        [
            *(tool, "pip", "sync", "--quiet", "--system-certs"),
            *("--python", str(folder), "--require-hashes", str(lock)),
        ],
    )
    return folder / "bin" / "python"


def _packages(name: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        absent("npm is missing: clients in Node are not tried", "REQUIRE_NODE")
    lock = HERE / "locks" / "node" / name
    folder = KEPT / f"node-{name}"
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    files = {path.name: path.read_bytes() for path in sorted(lock.iterdir())}
    _make(folder, files, [npm, "ci", "--prefix", str(folder), *quiet])
    return folder


def _make(folder: Path, files: Mapping[str, bytes], *commands: Sequence[str]) -> None:
    """Make it anew, unless it is complete and of these files."""
    KEPT.mkdir(exist_ok=True)
    # Two clients at once, or two workers, may want the same.
    with folder.with_suffix(".lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        digest = hashlib.sha256(b"\0".join(files.values())).hexdigest()
        complete = folder / "complete"
        if complete.exists() and complete.read_text() == digest:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for command in commands:
            _run(command)
        complete.write_text(digest)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=INSTALL_TIMEOUT_S,
            env={**TRUST, **os.environ},
        )
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode(errors="replace").split())
        absent(why[-300:], "REQUIRE_STACKS")
    except subprocess.TimeoutExpired as error:
        absent(str(error), "REQUIRE_STACKS")


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
