"""The pages of the manual, and their fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), README]
ADDRESS = "http://127.0.0.1:8080"
"""The address of the proxy in the examples."""


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    path: Path
    line: int
    language: str
    info: str
    """The rest of the line that opens the block."""
    text: str

    @property
    def id(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def fences(path: Path) -> Iterator[Fence]:
    """Yield the fenced blocks of a page, those in admonitions and lists too."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        if not (opening := re.fullmatch(r"( *)(`{3,}|~{3,})\s*([^\s`]*)([^`]*)", line)):
            continue
        indent, mark, language, info = opening.groups()
        block = []
        for _, inner in lines:
            if re.fullmatch(rf" *{mark}{mark[0]}*\s*", inner):
                break
            block.append(inner.removeprefix(indent))
        else:
            raise ValueError(f"{path}:{number}: the block has no end")
        yield Fence(path, number, language, info.strip(), "\n".join([*block, ""]))
