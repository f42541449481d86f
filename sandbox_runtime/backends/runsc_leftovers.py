"""What runsc leaves running on this host: its kernel and file server when a start fails, and the
engine's shim when so many processes end at once that it misses the end that matters.

The engine knows nothing of the former any more and waits for the latter for good; only the
container's id on their command lines tells whose they are. So the ids are written down before a
container starts, for later owners too.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PROGRAMS = ("runsc", "runsc-sandbox", "runsc-gofer", "containerd-shim-runc-v2")


class RunscLeftovers:
    """The containers of an installation that may leave something, by name, in a directory."""

    def __init__(self, state_dir: Path) -> None:
        self._notes = state_dir / "runsc"
        self._notes.mkdir(parents=True, exist_ok=True, mode=0o700)

    def note(self, name: str, container_id: str) -> None:
        """A container is about to start."""
        (self._notes / name).write_text(container_id, encoding="ascii")

    def kill(self, name: str) -> None:
        """Kill whatever runs for a container."""
        with contextlib.suppress(FileNotFoundError):
            for pid in _processes_of((self._notes / name).read_text(encoding="ascii")):
                logger.warning("container %s: runsc has left process %d, killed", name, pid)
                _kill(pid)

    def end(self, name: str) -> None:
        """The engine has removed a container, or never made it: kill what it left running."""
        self.kill(name)
        (self._notes / name).unlink(missing_ok=True)

    def sweep(self, is_leftover: Callable[[str], bool]) -> None:
        """End what containers of dead owners left running."""
        for note in self._notes.iterdir():
            if is_leftover(note.name):
                self.end(note.name)


def _processes_of(container_id: str) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to see
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            told = any(container_id.encode() in argument for argument in arguments)
            if told and container_id and Path(os.fsdecode(program)).name in _PROGRAMS:
                yield int(process.name)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        logger.warning("process %d cannot be killed: %s", pid, error)
