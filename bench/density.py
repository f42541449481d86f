"""Time to start many concurrent sandboxes, each with one command, and to remove them all."""

import signal

from bench.backends import Kind, working_backends
from bench.lenders import Lender, LenderPool, lender
from bench.plan import Plan, progress
from bench.processes import available_mib
from bench.table import Row, TablePart

COMMAND = "echo $((6 * 7)) > answer && grep -q 42 answer"
MAX_REMOVAL_S = 30


async def measure(plan: Plan) -> list[TablePart]:
    """Measure all kinds of sandboxes together, in one lender process."""
    async with working_backends(plan.image) as found:
        wanted: dict[Kind, int] = {
            "docker": plan.docker_at_once,
            "bubblewrap": plan.bubblewrap_at_once,
        }
        counts = {kind: wanted[kind] for kind in found.kinds if wanted[kind]}
    if not counts:
        return [TablePart("density: nowhere", found.missing)]
    lender_pools = [LenderPool(kind, max_sandboxes=count) for kind, count in counts.items()]
    async with lender(plan.image, lender_pools) as host:
        rows = [
            row for kind, count in counts.items() for row in await _measure_start(host, kind, count)
        ]
        rows += await _measure_removal(host, sum(counts.values()))
    title = " and ".join(f"{count} on {kind}" for kind, count in counts.items())
    return [TablePart(f"density: {title}, together", [*rows, *found.missing])]


async def _measure_start(host: Lender, kind: Kind, count: int) -> list[Row]:
    progress(f"density: {count} on {kind}")
    before_mib = available_mib()
    took_s = await host.order("hold", kind=kind, count=count, command=COMMAND)
    each_mib = (before_mib - available_mib()) / count
    return [
        Row(f"{kind}: all up, and each has run a command", [took_s], "s"),
        Row(f"{kind}: memory that the host has less, for each", [each_mib], "MiB"),
    ]


async def _measure_removal(host: Lender, count: int) -> list[Row]:
    progress("density: SIGTERM")
    sandboxes = host.sandbox_processes()
    ending = await host.end(signal.SIGTERM)
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
        Row("cgroups left", [host.cgroup_count()], "", 0),
    ]
