"""Time to start many concurrent sandboxes, each with one command, and to remove them all."""

import signal

from bench.backends import Kind, working_backends
from bench.lenders import Lender, LenderPool, lender
from bench.plan import Plan, show_progress
from bench.processes import available_mib
from bench.table import Row, TablePart

COMMAND = "echo $((6 * 7)) > answer && grep -q 42 answer"
MAX_REMOVAL_S = 30


async def measure(plan: Plan) -> list[TablePart]:
    """Measure all kinds of sandboxes together, in one lender process."""
    async with working_backends(plan.image) as found:
        wanted: dict[Kind, int] = {
            "docker": plan.docker_sandboxes,
            "bubblewrap": plan.bubblewrap_sandboxes,
        }
        counts = {kind: wanted[kind] for kind in found.kinds if wanted[kind]}
    if not counts:
        return [TablePart("density: nowhere", found.missing_rows)]
    lender_pools = [LenderPool(kind, max_sandboxes=count) for kind, count in counts.items()]
    async with lender(plan.image, lender_pools) as lender_process:
        rows = [
            row
            for kind, count in counts.items()
            for row in await _measure_start(lender_process, kind, count)
        ]
        rows += await _measure_removal(lender_process, sum(counts.values()))
    title = " and ".join(f"{count} on {kind}" for kind, count in counts.items())
    return [TablePart(f"density: {title}, together", [*rows, *found.missing_rows])]


async def _measure_start(lender_process: Lender, kind: Kind, count: int) -> list[Row]:
    show_progress(f"density: {count} on {kind}")
    before_mib = available_mib()
    took_s = await lender_process.order("hold", kind=kind, count=count, command=COMMAND)
    each_mib = (before_mib - available_mib()) / count
    return [
        Row(f"{kind}: all up, and each has run a command", [took_s], "s"),
        Row(f"{kind}: memory that the host has less, for each", [each_mib], "MiB"),
    ]


async def _measure_removal(lender_process: Lender, count: int) -> list[Row]:
    show_progress("density: SIGTERM")
    sandboxes = lender_process.sandbox_processes()
    ending = await lender_process.end(signal.SIGTERM)
    up = f"{len(sandboxes)} of {count} were up, {sum(map(len, sandboxes))} processes"
    return [
        Row(
            "SIGTERM to the owner, until all are gone",
            [ending.seconds],
            "s",
            MAX_REMOVAL_S,
            note=up,
        ),
        Row("processes left", [ending.remaining_processes], "", 0),
        Row("containers left", [ending.remaining_containers], "", 0),
        Row("cgroups left", [lender_process.cgroup_count()], "", 0),
    ]
