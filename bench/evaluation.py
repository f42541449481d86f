"""The cost of `sandbox-eval run` itself: its processor time and memory during an evaluation.

The runner sends problems to a proxy with real sandboxes, 64 at a time, in the mode "sandbox". The
model answers without delay and takes five turns for each problem. The measured share of a core is
the processor time of the runner's process divided by the duration of the process, start included.
With a slower model, the share is smaller.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.backends import Kind, working_backends
from bench.instant_model import FIVE_TURN_MODEL
from bench.plan import Plan
from bench.servers import ROOT, BenchServer, run_instant_model, run_proxy
from bench.table import Row, TablePart
from evaluation.samples import Draft, write_suite

PROBLEM_COUNTS: Mapping[Kind, Sequence[int]] = {
    "docker": (250, 1000),
    "bubblewrap": (250, 1000, 4000),
}
"""The numbers of problems. The memory must not grow with them."""
CONCURRENCY = 64
MAX_CPU_PERCENT = 5
MEASURED_COUNT = 1000
"""MAX_CPU_PERCENT applies to the evaluation with this number of problems."""
ROUNDS = 1


async def measure(plan: Plan) -> list[TablePart]:
    """Measure evaluations of each size with every backend that works here."""
    title = f"evaluation: sandbox-eval run, {CONCURRENCY} at once"
    if importlib.util.find_spec("rich") is None:
        return [TablePart(title, [Row("runner", note="the extra `evaluation` is not installed")])]
    async with working_backends(plan.image) as found:
        kinds = found.kinds
    rows = []
    rounds = range(plan.rounds or ROUNDS)
    async with run_instant_model() as model:
        for kind in kinds:
            async with run_proxy(model, sandbox=kind, image=plan.image) as server:
                for count in PROBLEM_COUNTS[kind]:
                    measured = [await _evaluate(server, count) for _ in rounds]
                    target = MAX_CPU_PERCENT if count == MEASURED_COUNT else None
                    rows += _rows(f"{kind}, {count} problems", measured, target)
                measured = [await _evaluate(server, MEASURED_COUNT, "--capture") for _ in rounds]
                rows += _rows(f"{kind}, {MEASURED_COUNT} problems, --capture", measured)
    return [TablePart(title, [*rows, *found.missing_rows])]


def _rows(
    name: str, measured: Sequence[Mapping[str, float]], target: float | None = None
) -> list[Row]:
    """Return the rows of the evaluations of one size. `target` is the maximum share of a core."""
    seconds, shares, peaks = zip(*(each.values() for each in measured), strict=True)
    return [
        Row(f"{name}: duration", seconds, "s"),
        Row(f"{name}: the runner's CPU, % of a core", shares, "", target),
        Row(f"{name}: the runner's peak memory", peaks, "MiB"),
    ]


async def _evaluate(server: BenchServer, count: int, *options: str) -> Mapping[str, float]:
    """Return the seconds, the percent of a core and the peak memory of one evaluation. `options`
    are further options of `sandbox-eval run`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        data = Path(directory, "data")
        drafts = [Draft(_sample_fields(number)) for number in range(count)]
        write_suite(data / "sums", "sums", drafts, licence="none", source="bench")
        command = [
            *(sys.executable, "-m", "evaluation", "run", "--models", FIVE_TURN_MODEL),
            *("--modes", "sandbox"),
            *("--data", str(data), "--output", f"{directory}/output"),
            *("--base-url", server.base_url, "--concurrency", str(CONCURRENCY), *options),
        ]
        return await asyncio.to_thread(_measure_command, command)


def _sample_fields(number: int) -> Mapping[str, str]:
    return {
        "id": f"sum/{number}",
        "domain": "sums",
        "kind": "sum",
        "problem": f"What is {number} + {number}?",
        "ground_truth": str(2 * number),
        "grader": "number",
    }


def _measure_command(command: list[str]) -> Mapping[str, float]:
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    took_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"s": took_s, "percent": 100 * cpu_s / took_s, "mib": usage.ru_maxrss / 1024}
