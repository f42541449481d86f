"""Whose sandbox or run is it: a lock that lives exactly as long as the process that holds it.

An engine may serve several proxies. Each has an owner id and holds a lock on a file of that name;
what carries the id of an owner whose lock is free is a leftover. The installation's id keeps
proxies on other hosts, whose locks cannot be seen from here, out of the question.
"""

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path


class Owner:
    """This process as owner of sandboxes, from construction until `release`."""

    def __init__(self, state_dir: Path) -> None:
        self._locks = state_dir / "owners"
        self._locks.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.install_id = _install_id(state_dir)
        self.id = uuid.uuid4().hex[:16]
        self._fd = self._hold(self._locks / self.id)

    def is_dead(self, owner_id: str) -> bool:
        """Whether the owner with that id, of this installation, is gone."""
        if owner_id == self.id:
            return False
        path = self._locks / Path(owner_id).name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, IsADirectoryError):  # the latter: it is nobody's
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(fd)

    def forget_dead(self) -> None:
        """Remove the lock files of dead owners, once nothing carries their id any more."""
        os.utime(self._fd)  # who removes old files must not take ours, for then we are dead
        for path in self._locks.iterdir():
            if self.is_dead(path.name):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back. Safe to call twice."""
        (self._locks / self.id).unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _hold(self, path: Path) -> int:
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
        # Whole or not at all: several proxies may start at once.
        whole = state_dir / f"install-id.{uuid.uuid4().hex}"
        whole.touch(mode=0o600)
        whole.write_text(uuid.uuid4().hex, encoding="ascii")
        with suppress(FileExistsError):
            path.hardlink_to(whole)
        whole.unlink()
    return path.read_text(encoding="ascii")
