"""Leaks after many cycles of leasing, using and releasing sandboxes."""

import signal
from dataclasses import asdict

from bench.backends import BenchBackend, working_backends
from bench.lenders import LenderPool, lender
from bench.plan import Plan, show_progress
from bench.table import Row, TablePart

CYCLES = 120
IDLE_COUNT = 2
MAX_GROWTH_MIB = 1.0
TARGETS = {"rss_mib": MAX_GROWTH_MIB}


async def measure(plan: Plan) -> list[TablePart]:
    """Measure each backend in turn."""
    cycles = plan.rounds or CYCLES
    async with working_backends(plan.image) as found:
        parts = [await _measure_backend(plan, backend, cycles) for backend in found.working]
    return (
        [*parts, TablePart("cycles: left out", found.missing_rows)] if found.missing_rows else parts
    )


async def _measure_backend(plan: Plan, backend: BenchBackend, cycles: int) -> TablePart:
    show_progress(f"cycles: {backend.name}")
    async with lender(plan.image, [LenderPool(backend.kind, IDLE_COUNT)]) as lender_process:
        await lender_process.order("cycle", kind=backend.kind, count=cycles // 2)
        # After the first cycles, the process has allocated the memory that a cycle needs.
        before = asdict(lender_process.resources())
        took_s = await lender_process.order("cycle", kind=backend.kind, count=cycles)
        after = asdict(lender_process.resources())
        ending = await lender_process.end(signal.SIGTERM)
        left = ending.remaining_count + lender_process.cgroup_count()
    rows = [
        Row(
            f"{what.replace('_', ' ')} more than before",
            [after[what] - before[what]],
            "MiB" if what == "rss_mib" else "",
            TARGETS.get(what, 0),
            note=f"{before[what]:.5g} before, {after[what]:.5g} after",
        )
        for what in before
    ]
    idle = f"{IDLE_COUNT} idle ones are there before and after"
    return TablePart(
        f"cycles: {backend.name}: {cycles} times leased, used, released ({idle})",
        [
            Row("a cycle", [took_s * 1000 / cycles]),
            *rows,
            Row("left after SIGTERM to the owner, of anything", [left], "", 0),
        ],
    )
