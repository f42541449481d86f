"""The command `python -m bench.compare OTHER [OPERATION ...]`: compare two checkouts.

Each checkout has its own virtual environment, as `make install` leaves it. Both are alive at the
same time and take turns of at most a few seconds, so that load on the machine affects both alike.
Two runs of `python -m bench`, one after the other, can differ by 10 % without a change of the code.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.backends import KINDS
from proxy.config import DockerConfig

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(".venv", "bin", "python")
WORKER = ROOT / "bench" / "compare_worker.py"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The size of the measurement of one operation."""

    repetitions: int
    """Repetitions in one turn."""
    turns: int
    what: str
    kinds: Sequence[str] = KINDS


COMPARISONS = {
    "command": Comparison(40, 40, "`true` in a sandbox"),
    "commands16": Comparison(20, 12, "20 times `true` in each of 16 sandboxes at once"),
    "cold": Comparison(2, 20, "start of a sandbox, to the end of its first `true`"),
    "warm": Comparison(5, 40, "lease of a ready sandbox"),
    "ping": Comparison(40, 40, "a ping of a sandbox"),
    "put1k": Comparison(40, 30, "1 KB into a sandbox"),
    "get1k": Comparison(40, 30, "1 KB out of a sandbox"),
    "put100m": Comparison(1, 30, "100 MiB into a sandbox"),
    "get100m": Comparison(1, 16, "100 MiB out of a sandbox"),
    "run": Comparison(3, 20, "a run of 5 turns on a ready sandbox"),
    "run-cpu": Comparison(20, 14, "the proxy's processor time for a run of 5 turns"),
    "runs64": Comparison(128, 8, "a run, 64 at once"),
    "plain": Comparison(300, 24, "`:plain`, whole", ("bubblewrap",)),
    "plain64": Comparison(1000, 24, "`:plain`, whole, 64 at once", ("bubblewrap",)),
    "plain64-cpu": Comparison(
        2000, 24, "the proxy's processor time for `:plain`, whole, 64 at once", ("bubblewrap",)
    ),
    "stream64": Comparison(200, 24, "`:plain`, streamed, 64 at once", ("bubblewrap",)),
}


class Checkout:
    """A process that measures one checkout."""

    def __init__(self, directory: Path, image: str, opened: ExitStack) -> None:
        self._process = opened.enter_context(
            subprocess.Popen(
                [directory / PYTHON, "-P", WORKER, image],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(directory)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self.kinds: Sequence[str] = self._read()
        """The backends that work."""

    def measure(self, operation: str, kind: str, repetitions: int) -> list[float]:
        """Return the durations of an operation, in ms. Raises RuntimeError."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # then `_read` raises
            self._process.stdin.write(f"{json.dumps([operation, kind, repetitions])}\n")
            self._process.stdin.flush()
        durations: list[float] = self._read()
        return durations

    def _read(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise RuntimeError("a checkout ended; its error is above")


def main() -> int:
    """Measure, and print a line for each operation and backend. Return the exit code, which is 1 if
    a backend does not work in both checkouts."""
    arguments = _parser().parse_args()
    if unknown := set(arguments.operations) - set(COMPARISONS):
        _parser().error(f"no such operation: {', '.join(sorted(unknown))}")
    if not (arguments.other / PYTHON).exists():
        _parser().error(f"{arguments.other} has no {PYTHON}: run `make install` there")
    status = 0
    with ExitStack() as opened:
        other, this = (
            Checkout(directory, arguments.image, opened)
            for directory in (arguments.other.resolve(), ROOT)
        )
        sys.stdout.write(
            "| | other, ms | this, ms"
            " | this / other: median of the turns, and the range of their middle half |\n"
        )
        sys.stdout.write("|---|---|---|---|\n")
        for operation in arguments.operations or COMPARISONS:
            for kind in COMPARISONS[operation].kinds:
                if kind not in other.kinds or kind not in this.kinds:
                    sys.stderr.write(f"{operation}: {kind} does not work in both checkouts\n")
                    status = 1
                    continue
                sys.stdout.write(f"{_compare(other, this, operation, kind)}\n")
                sys.stdout.flush()
    return status


def _compare(other: Checkout, this: Checkout, operation: str, kind: str) -> str:
    """Return the line of the table. The first turn is a warm-up and does not count."""
    comparison = COMPARISONS[operation]
    others: list[float] = []
    ours: list[float] = []
    ratios: list[float] = []
    for turn in range(comparison.turns + 1):
        order = [(other, others), (this, ours)]
        medians: dict[Checkout, float] = {}
        for checkout, durations in order if turn % 2 else reversed(order):
            measured = checkout.measure(operation, kind, comparison.repetitions)
            medians[checkout] = statistics.median(measured)
            durations += measured if turn else []
        if turn and medians[other]:
            ratios.append(medians[this] / medians[other])
    before, now = statistics.median(others), statistics.median(ours)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"| {comparison.what}, {kind} | {before:.3g} | {now:.3g} "
        f"| {middle:.3f}, {low:.3f} to {high:.3f} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER", help="directory of the other checkout")
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        help=f"one of {', '.join(COMPARISONS)}; default: all",
    )
    parser.add_argument("--image", default=DockerConfig().image, help="Docker image of sandboxes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
