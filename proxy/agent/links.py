"""Paths of produced files in an answer become links that open, also while it is streamed."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from urllib.parse import quote

from policies.workspace import OUTPUT_DIR

_GUESSED_DIRS = ("/mnt/data", OUTPUT_DIR)
"""Models name the directory they know from elsewhere."""
_NAME_GOES_ON = re.compile(r"[\w/-]|\.\w")


class LinkWriter:
    """Text in, text out; `sandbox:/…` and bare paths of the given files are rewritten."""

    def __init__(self, paths: Iterable[str], url_of: Callable[[str], str]) -> None:
        self._url_of = url_of
        self._targets = _spellings(paths)
        self._sorted = sorted(self._targets)
        longest_first = sorted(self._targets, key=len, reverse=True)
        alternatives = "|".join(re.escape(spelling) for spelling in longest_first)
        self._pattern = re.compile(rf"(?:{alternatives})(?!{_NAME_GOES_ON.pattern})")
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
        text = self._pending
        out: list[str] = []
        position = 0
        for match in self._pattern.finditer(text) if self._targets else ():
            if match.start() >= end:
                break
            out += [text[position : match.start()], self._link(match)]
            position = match.end()
        end = max(end, position)
        out.append(text[position:end])
        self._before = (self._before + text[:end])[-2:]
        self._pending = text[end:]
        return "".join(out)

    def _link(self, match: "re.Match[str]") -> str:
        path = self._targets[match.group()]
        before = (self._before + match.string[: match.start()])[-2:]
        url = self._url_of(path)
        if before.endswith(("](", "<", '"', "'", "=")):
            return url
        return f"[{path.rpartition('/')[2]}]({url})"


def _spellings(paths: Iterable[str]) -> dict[str, str]:
    """Every way a model may write a path → the path."""
    found: dict[str, str] = {}
    for path in paths:
        relative = path.removeprefix(OUTPUT_DIR + "/")
        for directory in _GUESSED_DIRS:
            plain = f"{directory}/{relative}"
            for written in {plain, quote(plain, errors="surrogateescape")}:
                for spelling in (written, "sandbox:" + written):
                    found[spelling] = path
                    found[f"`{spelling}`"] = path
    return found
