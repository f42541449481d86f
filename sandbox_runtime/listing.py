"""A listing as the agent sends it: a line of JSON for each file."""

import json
import re

from sandbox_runtime.sandbox import Entry

SHA256 = re.compile("[0-9a-f]{64}|")


def entries_in(text: bytes) -> tuple[Entry, ...] | None:
    """By path; None where one of them cannot be trusted."""
    entries = [_entry(line) for line in text.split(b"\n") if line]
    known = [entry for entry in entries if entry]
    if len(known) < len(entries):
        return None
    return tuple(sorted(known, key=lambda entry: entry.path))


def _entry(line: bytes) -> Entry | None:
    """One line of a listing, if it is one that can be trusted."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match value:
        case [str(path), "file" | "directory" | "other" as kind, int(size), *rest] if size >= 0:
            parts = path.split("/")
            if "" in parts or ".." in parts or "." in parts:
                return None
            match rest:
                case []:
                    return Entry(path, kind, size)
                case [str(digest)] if kind == "file" and SHA256.fullmatch(digest):
                    return Entry(path, kind, size, digest)
    return None
