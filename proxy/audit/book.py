"""One run's log on the disk. Whatever touches the disk blocks, and raises OSError."""

from collections.abc import Callable
from pathlib import Path

from proxy.audit.chain import Chain, Fields
from proxy.audit.day import Index, LogFile, log_path, time_of


class Book:
    """Begun, written to, finished; each once."""

    def __init__(
        self, directory: Path, run_id: str, key: bytes | None, now: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._run_id = run_id
        self._now = now
        self._chain = Chain(run_id, key)
        self._index = Index(directory, key)
        self._file: LogFile | None = None

    def line(self, fields: Fields) -> bytes:
        """What is to be appended next."""
        return self._chain.line(time_of(self._now()), fields)

    def begin(self) -> None:
        """Make the file, and note in the day's index that it is there."""
        self._file = LogFile(log_path(self._directory, self._run_id))
        self._index.append(time_of(self._now()), {"kind": "begun", "run": self._run_id})

    def append(self, line: bytes) -> None:
        """Put a line at its end."""
        assert self._file
        self._file.append(line)

    def finish(self) -> None:
        """Note in the index what it has come to; both outlive a power cut then."""
        assert self._file
        self._file.finish()
        told = {"run": self._run_id, "lines": self._chain.lines, "head": self._chain.head}
        self._index.append(time_of(self._now()), {"kind": "ended", **told})

    def close(self) -> None:
        """Let go of the file, if there is one."""
        if self._file:
            self._file.close()
