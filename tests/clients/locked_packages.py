"""Install third-party packages from lock files into folders that are reused while the lock is
unchanged.
"""

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
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
NODE_CA_ENVIRONMENT = {"NODE_EXTRA_CA_CERTS": str(CA_BUNDLE)} if CA_BUNDLE.exists() else {}
"""Make npm trust the certificates of this host, as pip and uv already do."""
ENVIRONMENT = {**NODE_CA_ENVIRONMENT, **os.environ}
"""Environment of this process at import. pytest changes os.environ at each test, and copying
it from another thread meanwhile can fail."""


class MissingError(Exception):
    """The packages cannot be installed on this host."""


def make_virtualenv(folder: Path, lock: Path, timeout_s: float = INSTALL_TIMEOUT_S) -> Path:
    """Return the interpreter of a virtualenv with the locked packages. Raise MissingError if it
    cannot be made.
    """
    tool = uv.find_uv_bin()
    make_folder(
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


def make_import_folder(folder: Path, lock: Path) -> Path:
    """Return a folder to import the locked packages from, without their dependencies. Raise
    MissingError if it cannot be made.

    The files are copies, not hard links into uv's cache: NLTK refuses to read linked data."""
    install = [
        *(uv.find_uv_bin(), "pip", "install", "--quiet", "--system-certs", "--no-deps"),
        *("--python", sys.executable, "--target", str(folder), "--link-mode", "copy"),
        *("--require-hashes", "--requirements", str(lock)),
    ]
    files = {lock.name: lock.read_bytes(), "made-by": sys.version.encode()}
    make_folder(folder, files, install)
    return folder


def make_folder(
    folder: Path,
    files: Mapping[str, bytes],
    *commands: Sequence[str],
    timeout_s: float = INSTALL_TIMEOUT_S,
) -> None:
    """Write `files` and run `commands` in a new folder, unless it is complete for the same files.

    Raise MissingError if a command fails or exceeds `timeout_s` seconds.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two tests, or two pytest workers, may need the same folder at once.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
