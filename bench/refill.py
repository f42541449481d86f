"""Latency of commands while a pool in the same process is refilled."""

from collections.abc import Callable, Mapping
from functools import partial

from bench.backends import BenchBackend, working_backends
from bench.plan import Measurement, Plan, interleave, milliseconds
from bench.table import TablePart, compared, figure, percentile
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 3
IDLE = 15
COMMANDS = 300
ALONE = "refill: p95 of a command with nothing beside it"
BESIDE = f"refill: p95 of a command while {IDLE} sandboxes are made"
RATIO = "refill: times as long"
TARGET = 2


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend."""
    async with working_backends(plan.image) as found:
        measurements: dict[str, Measurement] = {
            backend.name: partial(_both, backend) for backend in found.working
        }
        measured = await interleave(min(plan.rounds or ROUNDS, ROUNDS), measurements)
    names = [backend.name for backend in found.working]
    untargeted, targets = dict[str, float | None].fromkeys(names), dict.fromkeys(names, TARGET)
    return [
        compared(ALONE, measured, untargeted, {}),
        compared(BESIDE, measured, untargeted, {}),
        compared(RATIO, measured, targets, {}, unit="x", missing=found.missing),
    ]


async def _both(backend: BenchBackend) -> Mapping[str, float]:
    pool = Pool(
        backend.backend, PoolSettings(min_ready=IDLE, max_sandboxes=IDLE + 1), [Isolation()]
    )
    async with pool.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        beside = await _p95(sandbox, lambda: pool.stats().idle < IDLE)
        left = iter(range(COMMANDS))
        alone = await _p95(sandbox, lambda: next(left, None) is not None)
    await pool.aclose()
    return {
        figure(backend.name, ALONE): alone,
        figure(backend.name, BESIDE): beside,
        figure(backend.name, RATIO): beside / alone,
    }


async def _p95(sandbox: Sandbox, goes_on: Callable[[], bool]) -> float:
    took = []
    while goes_on():
        took.append(await milliseconds(sandbox.exec("true", timeout_s=60)))
    return percentile(took, 95)
