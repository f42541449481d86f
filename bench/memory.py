"""Host memory of an idle sandbox."""

from collections.abc import Mapping
from contextlib import AsyncExitStack

from bench.backends import BenchBackend, Kind, working_backends
from bench.lenders import LenderPool, lender
from bench.plain_docker import plain_container
from bench.plan import Plan, show_progress
from bench.processes import ProcessTree, cgroup_mib, pss_mib
from bench.table import Row, TablePart

SANDBOX_COUNT = 10
PLAIN = "docker run sleep"
TARGETS_MIB: Mapping[Kind, float] = {"docker": 5, "bubblewrap": 3}


async def measure(plan: Plan) -> list[TablePart]:
    """Measure several sandboxes of each backend in turn, and as many bare containers."""
    async with working_backends(plan.image) as found:
        rows = [row for backend in found.working for row in await _rows(plan, backend)]
        if "docker" in found.kinds:
            rows.append(await _plain_row(plan))
    return [TablePart("memory: a sandbox with nothing to do", [*rows, *found.missing_rows])]


async def _rows(plan: Plan, backend: BenchBackend) -> list[Row]:
    show_progress(f"memory: {backend.name}")
    async with lender(
        plan.image, [LenderPool(backend.kind, SANDBOX_COUNT, SANDBOX_COUNT)]
    ) as lender_process:
        await lender_process.order("fill", kind=backend.kind)
        sandboxes, agents = lender_process.sandbox_processes(), lender_process.guest_agents()
        try:
            whole = [pss_mib(sandbox) for sandbox in sandboxes]
            inside = [pss_mib([agent]) for agent in agents]
        except PermissionError:
            return [Row(backend.name, note="only root sees how much memory its processes share")]
        try:
            charged = [cgroup_mib(agent.pid) for agent in agents]
        except LookupError:
            charged = []
        programs = ", ".join(sorted({process.name for process in sandboxes[0]}))
    target = TARGETS_MIB[backend.kind]
    return [
        Row(backend.name, whole, "MiB", target, (PLAIN,), f"PSS of {programs}"),
        Row(f"{backend.name}: the agent of that", inside, "MiB"),
        Row(f"{backend.name}: its cgroup", charged, "MiB"),
    ]


async def _plain_row(plan: Plan) -> Row:
    show_progress(f"memory: {PLAIN}")
    async with AsyncExitStack() as opened:
        containers = [
            await opened.enter_async_context(plain_container(plan.image))
            for _ in range(SANDBOX_COUNT)
        ]
        pids = [await plain.main_pid(container) for plain, container in containers]
        tree = ProcessTree()
        try:
            held = [pss_mib(tree.with_descendants(tree.parent(pid))) for pid in pids]
        except PermissionError:
            held = []
    return Row(PLAIN, held, "MiB")
