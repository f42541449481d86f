"""Paths of produced files in an answer become links that open, also while it is streamed."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from urllib.parse import quote

from policies.workspace import OUTPUT_DIR, WORKING_DIR

_GUESSED_DIRS = ("/mnt/data", OUTPUT_DIR)
"""Models name the directory they know from elsewhere."""
_RELATIVE_DIR = OUTPUT_DIR.removeprefix(f"{WORKING_DIR}/")
_NAME_ENDS = r"(?![\w/-]|\.\w)"
_NAME_BEGAN = r"(?<![\w./\\\"'-])"
"""Stands before a relative path: neither the rest of another path, nor a string in code."""
_SEEN_BEFORE = 2
"""How many characters before a path decide what becomes of it."""


class LinkWriter:
    """Text in, text out; `sandbox:/…`, bare paths and relative paths of the given files are
    rewritten."""

    def __init__(self, paths: Iterable[str], url_of: Callable[[str], str]) -> None:
        self._url_of = url_of
        self._targets = _spellings(paths)
        self._sorted = sorted(self._targets)
        longest_first = sorted(self._targets, key=len, reverse=True)
        alternatives = "|".join(map(_written, longest_first))
        self._pattern = re.compile(alternatives)
        self._longest = len(longest_first[0]) + 2 if longest_first else 0
        self._pending = ""
        self._before = ""

    def feed(self, piece: str) -> str:
        """The text that is certain by now."""
        self._pending += piece
        if not self._targets:
            return self._release(len(self._pending))
        return self._release(self._certain())

    def finish(self) -> str:
        """The rest."""
        return self._release(len(self._pending))

    def _certain(self) -> int:
        """How much of the pending text no later text can turn into a path."""
        text = self._pending
        for index in range(max(0, len(text) - self._longest), len(text)):
            if self._may_become_path(text[index:]):
                return index
        return len(text)

    def _may_become_path(self, rest: str) -> bool:
        """Whether it begins a spelling, or is one whose end the next character decides."""
        at = bisect_left(self._sorted, rest)
        begins = at < len(self._sorted) and self._sorted[at].startswith(rest)
        return begins or rest[:-1] in self._targets

    def _release(self, end: int) -> str:
        """The text up to there; what follows is seen too, for it may go on with a path's name."""
        text = self._before + self._pending
        out: list[str] = []
        position = len(self._before)
        end += position
        for match in self._pattern.finditer(text, position) if self._targets else ():
            if match.start() >= end:
                break
            out += [text[position : match.start()], self._link(match)]
            position = match.end()
        end = max(end, position)
        out.append(text[position:end])
        self._before = text[max(0, end - _SEEN_BEFORE) : end]
        self._pending = text[end:]
        return "".join(out)

    def _link(self, match: "re.Match[str]") -> str:
        path = self._targets[match.group()]
        url = self._url_of(path)
        if match.group().startswith("]("):
            return f"]({url})"
        before = match.string[max(0, match.start() - _SEEN_BEFORE) : match.start()]
        if before.endswith(("](", "<", '"', "'", "=")):
            return url
        return f"[{path.rpartition('/')[2]}]({url})"


def _written(spelling: str) -> str:
    """Return the pattern of one spelling."""
    if spelling.startswith("]("):
        return re.escape(spelling)
    is_relative = spelling.lstrip("`").startswith((f"{_RELATIVE_DIR}/", f"./{_RELATIVE_DIR}/"))
    return (_NAME_BEGAN if is_relative else "") + re.escape(spelling) + _NAME_ENDS


def _spellings(paths: Iterable[str]) -> dict[str, str]:
    """Every way a model may write a path → the path."""
    found: dict[str, str] = {}
    for path in paths:
        relative = path.removeprefix(OUTPUT_DIR + "/")
        for name in {relative, quote(relative, errors="surrogateescape")}:
            absolute = [f"{directory}/{name}" for directory in _GUESSED_DIRS]
            below = f"{_RELATIVE_DIR}/{name}"
            for spelling in (*absolute, *(f"sandbox:{each}" for each in absolute)):
                found[spelling] = found[f"`{spelling}`"] = path
            for spelling in (below, f"./{below}"):
                found[spelling] = found[f"`{spelling}`"] = path
            for target in (name, f"./{name}"):
                found[f"]({target})"] = path
    return found
