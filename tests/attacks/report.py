"""The result of one attack, and the table that the command prints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HEADINGS = ("attack", "backend", "held", "figures")


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one attack."""

    attack: str
    backend: str
    """The sandbox backend with its runtime, or "-" if the attack needs no sandbox."""
    held: bool | None
    """None if the attack could not be made."""
    figures: str
    known_gap: bool = False
    """True if docs/security.md lists the attack below "What does not hold"."""

    @property
    def verdict(self) -> str:
        """The word in the column `held`."""
        if self.held is None:
            return "not tried"
        if self.held:
            return "yes"
        return "no (known)" if self.known_gap else "NO"

    @property
    def failed(self) -> bool:
        """True if the attack did not hold and no documentation says so."""
        return self.held is not True and not (self.held is False and self.known_gap)


def render(findings: Iterable[Finding]) -> str:
    """Return the findings as a table of text."""
    lines = [HEADINGS, *((f.attack, f.backend, f.verdict, f.figures) for f in findings)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS) - 1)]
    return "".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
    return "  ".join([*cells, line[-1]]) + "\n"
