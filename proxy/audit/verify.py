"""Audit logs held against their own hashes and their day's index: what `audit verify` tells."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxy.audit.chain import Fields, Reading, read
from proxy.audit.day import INDEX, days, log_path, oldest_kept

State = Literal["ok", "unfinished", "WRONG"]


@dataclass(frozen=True, slots=True)
class Finding:
    """How one log stands."""

    state: State
    name: str
    words: str

    def __str__(self) -> str:
        return f"{self.state:<10}  {self.name}  {self.words}"


def verify(
    root: Path, key: bytes | None, names: Sequence[str], keep_days: float
) -> Iterator[Finding]:
    """Every log there is, or those that are named, runs or files. A day that is older than days are
    kept is not missed."""
    if names:
        for name in names:
            yield from _named(root, key, name)
        return
    oldest = oldest_kept(time.time(), keep_days)
    before: dict[str, list[str]] = {}
    for directory in days(root):
        index = _Index(directory, key)
        yield index.finding(before, oldest)
        before[directory.name] = [str(entry["hash"]) for entry in index.reading.entries]
        for run_id in index.runs():
            yield index.log(run_id)


def _named(root: Path, key: bytes | None, name: str) -> Iterator[Finding]:
    if name.endswith(".jsonl"):
        path = Path(name)
        yield _Index(path.parent, key).log(path.stem)
        return
    found = [day for day in days(root) if name in _Index(day, key).runs()]
    if not found:
        yield Finding("WRONG", name, "there is no such log")
    for day in found:
        yield _Index(day, key).log(name)


class _Index:
    """A day's, as it was found."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self._directory = directory
        self._key = key
        self._path = log_path(directory, INDEX)
        data = self._path.read_bytes() if self._path.exists() else b""
        self.reading: Reading = read(data, directory.resolve().name, key)
        self._begun = set(self._told("begun"))
        self._ended = self._told("ended")

    def _told(self, kind: str) -> dict[str, Fields]:
        entries = self.reading.entries
        return {str(entry.get("run")): entry for entry in entries if entry.get("kind") == kind}

    def runs(self) -> list[str]:
        """All that the index or the directory knows."""
        found = {path.stem for path in self._directory.glob("*.jsonl")} - {INDEX}
        return sorted(found | self._begun)

    def finding(self, before: dict[str, list[str]], oldest: str) -> Finding:
        """How the index itself stands, after those of the days before."""
        name = f"{self._directory.name}/{INDEX}"
        entries = self.reading.entries
        if self.reading.fault:
            return Finding("WRONG", name, self.reading.fault)
        if not entries:
            return Finding("WRONG", name, "it is missing, or empty")
        if fault := _gap(entries[0].get("after"), before, oldest):
            return Finding("WRONG", name, fault)
        return Finding("ok", name, f"{len(entries)} lines, head {entries[-1]['hash']}")

    def log(self, run_id: str) -> Finding:
        """How a run's log stands."""
        name = f"{self._directory.name}/{run_id}"
        path = log_path(self._directory, run_id)
        if not path.exists():
            return Finding("WRONG", name, "the log is missing")
        data = path.read_bytes()
        log = read(data, run_id, self._key)
        lines = f"{len(log.entries)} lines"
        if fault := log.fault or self._mismatch(run_id, log, data):
            return Finding("WRONG", name, fault)
        if not log.is_over:
            return Finding("unfinished", name, f"{lines}: the run is at work, or was killed")
        if run_id not in self._ended:
            return Finding("unfinished", name, f"{lines}: its end is not in the index")
        return Finding("ok", name, f"{lines}, {_ending(log.entries[-1])}")

    def _mismatch(self, run_id: str, log: Reading, data: bytes) -> str:
        if run_id not in self._begun:
            # Its file is made first: a process may have been killed before it could write more.
            return "it is not in the index" if data else ""
        ended = self._ended.get(run_id)
        if ended is None:
            fault = self.reading.fault
            return f"its end may have been in the index, where {fault}" if fault else ""
        head = log.entries[-1]["hash"] if log.entries else ""
        if (len(log.entries), head) != (ended.get("lines"), ended.get("head")):
            return f"it is not as it ended, with {ended.get('lines')} lines"
        if not data.endswith(b"\n"):
            return "something follows its last line"
        return ""


def _gap(after: Fields | None, before: dict[str, list[str]], oldest: str) -> str:
    """What is wrong with the days before this one."""
    latest = max(before, default=None)
    if after is None:
        return "" if latest is None else f"it does not go on from {latest}"
    day, head = str(after.get("day")), after.get("head")
    if day not in before:
        return "" if day < oldest else f"the logs of {day} are missing"
    if latest != day:
        return f"it does not go on from {latest}"
    return "" if not head or head in before[day] else f"the index of {day} is another"


def _ending(last: Fields) -> str:
    if last.get("kind") == "failure":
        return f"failed: {last.get('error')}"
    return ", ".join(str(each.get("stop_reason")) for each in last.get("choices", ()))
