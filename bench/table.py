"""Measured values and their table."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "ms", "s", "req/s", "runs/min", "commands/s", "MB/s", "CPU ms", "MiB", "x", "tokens", ""
]
RATE_UNITS: tuple[Unit, ...] = ("req/s", "runs/min", "commands/s", "MB/s")
HEADINGS = (
    *("", "n", "median", "min", "p90", "p99", "", "target"),
    "times better than (ratio of medians)",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity, or the reason why it was not measured."""

    label: str
    samples: Sequence[float] = ()
    unit: Unit = "ms"
    target: float | None = None
    """The target: an upper bound, or a lower bound for a rate."""
    peers: tuple[str, ...] = ()
    """The names of the rows in the same part that this row is compared with."""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def times_better_than(self, peer: "Row") -> float:
        """Return the ratio of the medians; above 1, this row is better."""
        if self.unit in RATE_UNITS:
            return self.median / peer.median
        return peer.median / self.median if self.median else float("inf")


@dataclass(frozen=True, slots=True)
class TablePart:
    """Rows that were measured in turn in one loop."""

    name: str
    rows: Sequence[Row]


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the value that `percent` percent of the samples do not exceed."""
    if len(samples) < 2:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def sample_key(name: str, quantity: str) -> str:
    """Return the key by which `comparison_part` finds a quantity of one backend or peer."""
    return f"{name}: {quantity}"


def comparison_part(
    quantity: str,
    measured: Mapping[str, Sequence[float]],
    targets: Mapping[str, float | None],
    peers: Mapping[str, Sequence[str]],
    *,
    unit: Unit = "ms",
    missing_rows: Iterable[Row] = (),
) -> TablePart:
    """Return the rows of one quantity: the backends in `targets`, compared with their `peers`, then
    the peers, then `missing_rows`.
    """

    def samples(name: str) -> Sequence[float]:
        return measured.get(sample_key(name, quantity), ())

    ours = [
        Row(name, samples(name), unit, target, tuple(peers.get(name, ())))
        for name, target in targets.items()
    ]
    theirs = dict.fromkeys(name for each in ours for name in each.peers)
    rows = [*ours, *(Row(name, samples(name), unit) for name in theirs)]
    return TablePart(quantity, [*(row for row in rows if row.samples), *missing_rows])


def render(parts: Iterable[TablePart]) -> str:
    """Return the table as text."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for part in parts:
        lines.append((part.name.upper(),))
        lines += [_cells(row, part.rows) for row in part.rows]
    widths = [
        max(len(line[column]) for line in lines if len(line) > 1)
        for column in range(len(HEADINGS) - 1)
    ]
    return "\n".join(_align_cells(line, widths) for line in lines) + "\n"


def _cells(row: Row, part_rows: Sequence[Row]) -> tuple[str, ...]:
    if not row.samples:
        return (f"  {row.label}", *("" for _ in HEADINGS[2:]), row.note)
    spread = (min(row.samples), percentile(row.samples, 90), percentile(row.samples, 99))
    known = {other.label: other for other in part_rows if other.samples}
    ratios = [
        f"{_number_text(row.times_better_than(known[name]))}x {name}"
        for name in row.peers
        if name in known
    ]
    return (
        f"  {row.label}",
        str(len(row.samples)),
        _number_text(row.median),
        *(_number_text(value) if len(row.samples) > 1 else "" for value in spread),
        row.unit,
        _verdict(row),
        "; ".join([*ratios, *([row.note] if row.note else [])]),
    )


def _verdict(row: Row) -> str:
    if row.target is None:
        return ""
    rate = row.unit in RATE_UNITS
    met = row.median >= row.target if rate else row.median <= row.target
    return f"{'>=' if rate else '<='} {_number_text(row.target)} {'met' if met else 'MISSED'}"


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _align_cells(line: Sequence[str], widths: Sequence[int]) -> str:
    numeric = range(1, 6)
    cells = [
        cell.rjust(width) if column in numeric else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=False))
    ]
    return "  ".join([*cells, *line[len(widths) :]]).rstrip()
