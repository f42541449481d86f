"""Folders of foreign packages, each made from its lock and kept while the lock stays."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uv

INSTALL_TIMEOUT_S = 300
TRUSTED = Path("/etc/ssl/certs/ca-certificates.crt")
TRUST = {"NODE_EXTRA_CA_CERTS": str(TRUSTED)} if TRUSTED.exists() else {}
"""What makes npm trust whom this host trusts, as pip and uv do."""
ENVIRONMENT = {**TRUST, **os.environ}
"""Of this process at its start: pytest changes its own at each test, under a thread's copying."""


class MissingError(Exception):
    """A folder cannot be made here."""


def python_in(folder: Path, lock: Path, timeout_s: float = INSTALL_TIMEOUT_S) -> Path:
    """The interpreter of a virtualenv with the packages of a lock. Raises MissingError."""
    tool = uv.find_uv_bin()
    make(
        folder,
        {lock.name: lock.read_bytes(), "made-by": sys.version.encode()},
        [tool, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        [
            *(tool, "pip", "sync", "--quiet", "--system-certs"),
            *("--python", str(folder), "--require-hashes", str(lock)),
        ],
        timeout_s=timeout_s,
    )
    return folder / "bin" / "python"


def make(
    folder: Path,
    files: Mapping[str, bytes],
    *commands: Sequence[str],
    timeout_s: float = INSTALL_TIMEOUT_S,
) -> None:
    """Make it anew, unless it is complete and of these files. Raises MissingError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
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
            _run(command, timeout_s)
        complete.write_text(digest)


def _run(command: Sequence[str], timeout_s: float) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=timeout_s,
            env=ENVIRONMENT,
        )
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode(errors="replace").split())
        raise MissingError(why[-300:]) from error
    except subprocess.TimeoutExpired as error:
        raise MissingError(str(error)) from error
