"""Lines that hold each other: each has the hash of the one before, and its own. Pure."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = "llm-sandbox-proxy audit 1"
LAST = "last"
"""The field that only the last line has."""
Fields = Mapping[str, Any]


class Chain:
    """Makes the lines of one log, in order."""

    def __init__(self, seed: str, key: bytes | None, *, at: Fields | None = None) -> None:
        """`seed` is what the log is of; with `at`, a last line, it goes on after that."""
        self._key = key
        self.head: str = at["hash"] if at else digest(f"{VERSION}\n{seed}".encode(), key)
        self.lines: int = at["seq"] + 1 if at else 0

    def line(self, time: str, fields: Fields) -> bytes:
        """The next one."""
        entry = {**fields, "seq": self.lines, "time": time, "prev": self.head}
        self.head = digest(canonical(entry), self._key)
        self.lines += 1
        return canonical({**entry, "hash": self.head}) + b"\n"


@dataclass(frozen=True, slots=True)
class Reading:
    """A log as it was found."""

    entries: tuple[Fields, ...]
    """Those that hold."""
    fault: str = ""
    """What is wrong with it, if anything is."""

    @property
    def is_over(self) -> bool:
        """Whether it came to its end."""
        return bool(self.entries) and LAST in self.entries[-1]


def read(data: bytes, seed: str, key: bytes | None) -> Reading:
    """Hold a log against its own hashes. One that breaks off has no fault, as long as what there is
    of its last line can have been the beginning of one."""
    *lines, torn = data.split(b"\n")
    chain = Chain(seed, key)
    entries: list[Fields] = []
    for number, line in enumerate(lines, 1):
        entry = _parsed(line)
        if entries and LAST in entries[-1]:
            return Reading(tuple(entries), f"line {number} comes after the last")
        if fault := _fault(entry, line, chain):
            return Reading(tuple(entries), f"line {number} {fault}")
        assert entry is not None
        chain = Chain(seed, key, at=entry)
        entries.append(entry)
    if torn and not is_torn(torn):
        return Reading(tuple(entries), f"line {len(lines) + 1} is not as it was written")
    return Reading(tuple(entries))


def is_torn(tail: bytes) -> bool:
    """Whether it can be what a killed process has left of a line; a spoilt one is not."""
    try:
        json.JSONDecoder().raw_decode(tail.decode(errors="replace"))
    except (ValueError, RecursionError):
        return tail.startswith(b"{")
    return False


def canonical(value: Fields) -> bytes:
    """The one way in which it is written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(data: bytes, key: bytes | None) -> str:
    """The hash, which with a key nobody else can make."""
    if key is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _fault(entry: Fields | None, line: bytes, chain: Chain) -> str:
    if entry is None or canonical(entry) != line:
        return "is not as it was written"
    if entry.get("seq") != chain.lines:
        return f"has the number {entry.get('seq')}, and {chain.lines} was due"
    if entry.get("prev") != chain.head:
        return "does not go on from what is before it"
    written = {name: value for name, value in entry.items() if name not in ("hash", "time")}
    if chain.line(entry.get("time", ""), written) != line + b"\n":
        return "is not what its hash was made of (with this key)"
    return ""


def _parsed(line: bytes) -> Fields | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("hash"), str) else None
