"""Latency of commands while a pool in the same process is refilled."""

from collections.abc import Callable, Mapping
from functools import partial

from bench.backends import BenchBackend, working_backends
from bench.plan import Measurement, Plan, interleave, measure_ms
from bench.table import TablePart, comparison_part, percentile, sample_key
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 3
IDLE_COUNT = 15
COMMANDS = 300
ALONE = "refill: p95 of a command with nothing beside it"
BESIDE = f"refill: p95 of a command while {IDLE_COUNT} sandboxes are made"
RATIO = "refill: times as long"
MAX_RATIO = 2


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend."""
    async with working_backends(plan.image) as found:
        measurements: dict[str, Measurement] = {
            backend.name: partial(_measure_backend, backend) for backend in found.working
        }
        measured = await interleave(min(plan.rounds or ROUNDS, ROUNDS), measurements)
    names = [backend.name for backend in found.working]
    untargeted, targets = dict[str, float | None].fromkeys(names), dict.fromkeys(names, MAX_RATIO)
    return [
        comparison_part(ALONE, measured, untargeted, {}),
        comparison_part(BESIDE, measured, untargeted, {}),
        comparison_part(RATIO, measured, targets, {}, unit="x", missing_rows=found.missing_rows),
    ]


async def _measure_backend(backend: BenchBackend) -> Mapping[str, float]:
    pool = Pool(
        backend.backend,
        PoolSettings(min_ready=IDLE_COUNT, max_sandboxes=IDLE_COUNT + 1),
        [Isolation()],
    )
    async with pool.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        beside = await _measure_p95_ms(sandbox, lambda: pool.stats().idle < IDLE_COUNT)
        left = iter(range(COMMANDS))
        alone = await _measure_p95_ms(sandbox, lambda: next(left, None) is not None)
    await pool.aclose()
    return {
        sample_key(backend.name, ALONE): alone,
        sample_key(backend.name, BESIDE): beside,
        sample_key(backend.name, RATIO): beside / alone,
    }


async def _measure_p95_ms(sandbox: Sandbox, should_continue: Callable[[], bool]) -> float:
    took = []
    while should_continue():
        took.append(await measure_ms(sandbox.exec("true", timeout_s=60)))
    return percentile(took, 95)
