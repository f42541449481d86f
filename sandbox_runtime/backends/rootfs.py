"""A root file system for bubblewrap: a directory, or a tar (`docker export`) unpacked once."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from sandbox_runtime.errors import SandboxStartError

_TAR = ("tar", "--extract", "--file=-", "--no-same-owner", "--delay-directory-restore")
_NO_DEVICES = ("--anchored", "--exclude=dev/*", "--exclude=./dev/*")


def prepare_rootfs(rootfs: Path, *, cache: Path, uid: int, as_uid: tuple[str, ...]) -> Path:
    """The directory to start from, which belongs to `uid`. Raises SandboxStartError.

    `as_uid` is what a command is preceded by to be run as that user.
    """
    try:
        directory = _unpacked(rootfs, cache, uid, as_uid) if rootfs.is_file() else rootfs
        owner = directory.stat().st_uid
    except OSError as error:
        raise SandboxStartError(f"cannot use rootfs {str(rootfs)!r}: {error}") from error
    if owner != uid:
        raise SandboxStartError(
            f"rootfs {str(directory)!r} belongs to uid {owner}, but sandboxes run as uid {uid}:"
            " give it to that user or configure its tar file"
        )
    return directory


def rootfs_fingerprint(rootfs: Path) -> str:
    """Changes when the directory or tar is replaced by another. Raises SandboxStartError."""
    try:
        status = rootfs.stat()
    except OSError as error:
        raise SandboxStartError(f"cannot use rootfs {str(rootfs)!r}: {error}") from error
    return f"{rootfs}:{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _unpacked(archive: Path, cache: Path, uid: int, as_uid: tuple[str, ...]) -> Path:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / digest
    # For nobody else to enter; sandboxes get the directory open and need no way to it.
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (cache / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = cache / f"{digest}.partial"
            if partial.exists():
                shutil.rmtree(partial)
            _unpack(archive, partial, uid, as_uid)
            partial.rename(target)
    return target


def _unpack(archive: Path, target: Path, uid: int, as_uid: tuple[str, ...]) -> None:
    target.mkdir()
    os.chown(target, uid, -1)
    with archive.open("rb") as file:
        # The archive and the directory are handed over open, for the user may be unable to reach
        # them by path (below /root, for one).
        done = subprocess.run(
            (*as_uid, *_TAR, *_NO_DEVICES),
            cwd=target,
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxStartError(f"cannot unpack {str(archive)!r}: {' / '.join(said[:3])}")
