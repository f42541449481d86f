"""The command `python -m bench.compare OTHER [OPERATION ...]`: compare two checkouts.

Each checkout has its own virtual environment, as `make install` leaves it. A process of each is
alive at the same time, and the two take turns of at most a few seconds, so that load on the machine
affects both alike. Two processes of the same code differ by up to a tenth as long as they live, so
several such pairs are measured, one after the other.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bench.backends import KINDS
from bench.servers import run_instant_model
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
    """Turns of one pair of processes."""
    what: str
    kinds: Sequence[str] = KINDS


COMPARISONS = {
    "command": Comparison(40, 7, "`true` in a sandbox"),
    "commands16": Comparison(20, 3, "20 times `true` in each of 16 sandboxes at once"),
    "cold": Comparison(3, 7, "start of a sandbox, to the end of its first `true`"),
    "warm": Comparison(5, 9, "lease of a ready sandbox"),
    "ping": Comparison(100, 9, "a ping of a sandbox"),
    "put1k": Comparison(80, 9, "1 KB into a sandbox"),
    "get1k": Comparison(80, 9, "1 KB out of a sandbox"),
    "put100m": Comparison(1, 5, "100 MiB into a sandbox"),
    "get100m": Comparison(1, 3, "100 MiB out of a sandbox"),
    "run": Comparison(3, 5, "a run of 5 turns on a ready sandbox"),
    "run-cpu": Comparison(20, 3, "the proxy's processor time for a run of 5 turns"),
    "runs64": Comparison(128, 3, "a run, 64 at once"),
    "plain": Comparison(300, 6, "`:plain`, whole", ("bubblewrap",)),
    "plain64": Comparison(1000, 6, "`:plain`, whole, 64 at once", ("bubblewrap",)),
    "plain64-cpu": Comparison(
        2000, 6, "the proxy's processor time for `:plain`, whole, 64 at once", ("bubblewrap",)
    ),
    "stream64": Comparison(200, 6, "`:plain`, streamed, 64 at once", ("bubblewrap",)),
    "start": Comparison(1, 4, "start of the proxy, to its first answer", ("bubblewrap",)),
    "start-cpu": Comparison(
        1, 4, "the proxy's processor time until its first answer", ("bubblewrap",)
    ),
}


class CheckoutProcess:
    """A process that measures one checkout."""

    def __init__(self, directory: Path, image: str, model_port: int, opened: ExitStack) -> None:
        self._process = opened.enter_context(
            subprocess.Popen(
                [directory / PYTHON, "-P", WORKER, image, str(model_port)],
                cwd=directory,
                # Without compiled modules each start would take a third longer. The warm-up turn
                # writes them.
                env={
                    **os.environ,
                    "PYTHONPATH": str(directory),
                    "PYTHONDONTWRITEBYTECODE": "",
                },
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


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of one operation that one pair of processes has measured, in ms."""

    before: Sequence[float]
    now: Sequence[float]
    ratios: Sequence[float]
    """For each turn, how many times as long this checkout took as the other one."""


def main() -> int:
    """Measure, and print a line for each operation and backend. Return the exit code, which is 1 if
    a backend does not work in both checkouts."""
    arguments = _parser().parse_intermixed_args()
    if unknown := set(arguments.operations) - set(COMPARISONS):
        _parser().error(f"no such operation: {', '.join(sorted(unknown))}")
    if not (arguments.other / PYTHON).exists():
        _parser().error(f"{arguments.other} has no {PYTHON}: run `make install` there")
    if arguments.pairs < 1:
        _parser().error("--pairs: at least 1")
    asked = [
        (operation, kind)
        for operation in arguments.operations or COMPARISONS
        for kind in COMPARISONS[operation].kinds
    ]
    measured = asyncio.run(_measure(arguments, asked))
    sys.stdout.write("| | other, ms | this, ms | this / other: median and range of the pairs |\n")
    sys.stdout.write("|---|---|---|---|\n")
    for (operation, kind), pairs in measured.items():
        sys.stdout.write(f"| {COMPARISONS[operation].what}, {kind} {_result_cells(pairs)}\n")
    return 0 if all(measured.values()) else 1


async def _measure(
    arguments: argparse.Namespace, asked: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[Durations]]:
    """Return the durations that each pair of processes has measured, by operation and backend. Both
    checkouts use the model server of this checkout."""
    measured: dict[tuple[str, str], list[Durations]] = {each: [] for each in asked}
    async with run_instant_model() as model:
        for number in range(1, arguments.pairs + 1):
            with ExitStack() as opened:
                other, this = (
                    CheckoutProcess(directory, arguments.image, model.port, opened)
                    for directory in (arguments.other.resolve(), ROOT)
                )
                for operation, kind in asked:
                    if kind in other.kinds and kind in this.kinds:
                        durations = _measure_pair(other, this, operation, kind)
                        measured[operation, kind].append(durations)
                        ratio = statistics.median(durations.ratios)
                        of = f"pair {number} of {arguments.pairs}: {operation}, {kind}"
                        sys.stderr.write(f"{of}: {ratio:.3f}\n")  # of use if a later pair fails
    return measured


def _measure_pair(
    other: CheckoutProcess, this: CheckoutProcess, operation: str, kind: str
) -> Durations:
    """Measure both checkouts in each turn, in an order that alternates. The first turn is a warm-up
    and does not count."""
    comparison = COMPARISONS[operation]
    before: list[float] = []
    now: list[float] = []
    ratios: list[float] = []
    for turn in range(comparison.turns + 1):
        order = [(other, before), (this, now)]
        medians: dict[CheckoutProcess, float] = {}
        for checkout, durations in order if turn % 2 else reversed(order):
            measured = checkout.measure(operation, kind, comparison.repetitions)
            medians[checkout] = statistics.median(measured)
            durations += measured if turn else []
        if turn and medians[other]:
            ratios.append(medians[this] / medians[other])
    return Durations(before, now, ratios)


def _result_cells(pairs: Sequence[Durations]) -> str:
    """Return the cells of a row after its first cell."""
    if not pairs:
        return "| does not work in both checkouts | | |"
    before = statistics.median(chain.from_iterable(pair.before for pair in pairs))
    now = statistics.median(chain.from_iterable(pair.now for pair in pairs))
    ratios = [statistics.median(pair.ratios) for pair in pairs]
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return f"| {before:.3g} | {now:.3g} | {middle:.3f}, {low:.3f} to {high:.3f} |"


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
    parser.add_argument("--pairs", type=int, default=6, help="number of pairs; default: 6")
    return parser


if __name__ == "__main__":
    sys.exit(main())
