"""Ownership of sandboxes and runs: a file lock that is held exactly as long as its process lives.

Several proxies may share one engine. Each has an owner id and locks a file of that name. A sandbox
or run whose owner's lock is free is a leftover of a dead process. The locks of proxies on other
hosts cannot be seen, so sandboxes also carry an installation id, and a proxy looks only at those
of its own installation.
"""

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path


class Owner:
    """This process as an owner of sandboxes and runs, from construction until `release`."""

    def __init__(self, state_dir: Path) -> None:
        self._lock_directory = state_dir / "owners"
        self._lock_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.install_id = _install_id(state_dir)
        self.id = uuid.uuid4().hex[:16]
        self._lock_fd = self._lock_new_file(self._lock_directory / self.id)

    def is_dead(self, owner_id: str) -> bool:
        """Return True if no living process holds the owner's lock. `owner_id` must be of this
        installation: an unknown id counts as dead."""
        if owner_id == self.id:
            return False
        path = self._lock_directory / Path(owner_id).name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, IsADirectoryError):  # an empty id gives the directory itself
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(fd)

    def remove_dead_records(self) -> None:
        """Remove the lock files of dead owners; their ids still count as dead. Renew the
        modification time of this owner's lock file: call this regularly, or a cleaner of old files
        may remove the lock, and this owner would count as dead."""
        os.utime(self._lock_fd)
        for path in self._lock_directory.iterdir():
            if self.is_dead(path.name):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        (self._lock_directory / self.id).unlink(missing_ok=True)
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock_new_file(self, path: Path) -> int:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A sweep may have removed the file between our open and our lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
            os.close(fd)


def _install_id(state_dir: Path) -> str:
    path = state_dir / "install-id"
    if not path.exists():
        # Written to a temporary file first: several proxies may start at the same time.
        temporary = state_dir / f"install-id.{uuid.uuid4().hex}"
        temporary.touch(mode=0o600)
        temporary.write_text(uuid.uuid4().hex, encoding="ascii")
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
        temporary.unlink()
    return path.read_text(encoding="ascii")
