"""Time until sandboxes are gone after their owner was killed by SIGKILL."""

import signal
from collections.abc import Mapping
from functools import partial

from bench.backends import BenchBackend, working_backends
from bench.lenders import LenderPool, lender
from bench.plan import Measurement, Plan, interleave
from bench.table import Row, TablePart

ROUNDS = 3
SANDBOX_COUNT = 4
BACKGROUND_COMMAND = "sleep 600 </dev/null >/dev/null 2>&1 &"
TARGET_S = 1


async def measure(plan: Plan) -> list[TablePart]:
    """Measure sandboxes with a background process, on each backend in turn."""
    async with working_backends(plan.image) as found:
        measurements: dict[str, Measurement] = {
            backend.name: partial(_measure_kill, plan, backend) for backend in found.working
        }
        measured = await interleave(min(plan.rounds or ROUNDS, ROUNDS), measurements)
    rows = []
    for backend in found.working:
        worst = [max(measured[_remaining_row_name(backend)])]
        rows += [
            Row(backend.name, measured[backend.name], "s", TARGET_S),
            Row(
                _remaining_row_name(backend),
                worst,
                "",
                0,
                note="processes, containers, cgroups; the worst round",
            ),
        ]
    title = f"owner: SIGKILLed, until its {SANDBOX_COUNT} sandboxes are gone"
    return [TablePart(title, [*rows, *found.missing_rows])]


async def _measure_kill(plan: Plan, backend: BenchBackend) -> Mapping[str, float]:
    async with lender(plan.image, [LenderPool(backend.kind)]) as lender_process:
        await lender_process.order(
            "hold", kind=backend.kind, count=SANDBOX_COUNT, command=BACKGROUND_COMMAND
        )
        ending = await lender_process.end(signal.SIGKILL)
        await backend.backend.sweep()  # as every proxy does at its start
        return {
            backend.name: ending.seconds,
            _remaining_row_name(backend): ending.remaining_count + lender_process.cgroup_count(),
        }


def _remaining_row_name(backend: BenchBackend) -> str:
    return f"{backend.name}: left after the next sweep"
