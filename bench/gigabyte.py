"""Transfer of a gigabyte into and out of a sandbox, and the growth of memory during it."""

from bench.backends import BenchBackend
from bench.lenders import LenderPool, lender
from bench.plan import Plan, show_progress
from bench.processes import peak_rss_mib, rss_mib
from bench.table import Row, TablePart

MB_PER_GB = 1000
"""Number of megabytes in a gigabyte."""
MAX_GROWTH_MIB = 16
"""Maximum growth of memory in MiB, because only buffers of the data may be in memory."""
TARGET_MB_PER_S = 80


async def measure_gigabyte(plan: Plan, backends: list[BenchBackend]) -> TablePart:
    """Measure each backend once, in a process that does nothing else."""
    rows: list[Row] = []
    for backend in backends:
        show_progress(f"1 GB: {backend.name}")
        rows += await _rows(plan, backend)
    return TablePart("files: 1 GB in and out, and the most memory on the way", rows)


async def _rows(plan: Plan, backend: BenchBackend) -> list[Row]:
    async with lender(plan.image, [LenderPool(backend.kind)]) as lender_process:
        await lender_process.order("hold", kind=backend.kind, count=1, command="true")
        pids = {"host": lender_process.pid, "agent": lender_process.guest_agents()[0].pid}
        before = {who: rss_mib(pid) for who, pid in pids.items()}
        in_s = await lender_process.order("put", kind=backend.kind, size=MB_PER_GB * 10**6)
        out_s = await lender_process.order("get", kind=backend.kind, size=MB_PER_GB * 10**6)
        most = {who: peak_rss_mib(pid) for who, pid in pids.items()}
    return [
        Row(f"{backend.name}: in", [MB_PER_GB / in_s], "MB/s", TARGET_MB_PER_S),
        Row(f"{backend.name}: out", [MB_PER_GB / out_s], "MB/s", TARGET_MB_PER_S),
        *(
            Row(
                f"{backend.name}: growth of the {who}'s memory",
                [most[who] - before[who]],
                "MiB",
                MAX_GROWTH_MIB,
                note=f"{before[who]:.1f} before, {most[who]:.1f} at most",
            )
            for who in pids
        ),
    ]
