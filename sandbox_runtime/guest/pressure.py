"""How often the sandbox has hit a limit, as its control group counts it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORDS = {"oom": b"oom_kill", "pids": b"max"}
"""The line that counts, in whichever file there is."""


class Pressure:
    """The counters that can be read here; what cannot be read counts nothing."""

    def __init__(self, paths: Mapping[str, Sequence[str]]) -> None:
        self._files = {name: _first_open(paths.get(name, ())) for name in WORDS}

    def read(self) -> dict[str, int]:
        """The counters now."""
        return {name: _count(fd, WORDS[name]) for name, fd in self._files.items()}


def _first_open(paths: Sequence[str]) -> int:
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def _count(fd: int, word: bytes) -> int:
    if fd < 0:
        return 0
    try:
        lines = os.pread(fd, 4096, 0).splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, number = line.partition(b" ")
        if name == word and number.isdigit():
            return int(number)
    return 0
