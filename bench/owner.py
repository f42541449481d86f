"""Time until sandboxes are gone after their owner was killed by SIGKILL."""

import signal
from collections.abc import Mapping
from functools import partial

from bench.lenders import Stock, lender
from bench.places import BenchBackend, places
from bench.plan import Measurement, Plan, interleave
from bench.table import Row, TablePart

ROUNDS = 3
SANDBOXES = 4
WORK = "sleep 600 </dev/null >/dev/null 2>&1 &"
TARGET_S = 1


async def measure(plan: Plan) -> list[TablePart]:
    """Measure sandboxes with a background process, on each backend in turn."""
    async with places(plan.image) as found:
        measurements: dict[str, Measurement] = {
            place.name: partial(_killed, plan, place) for place in found.found
        }
        measured = await interleave(min(plan.rounds or ROUNDS, ROUNDS), measurements)
    rows = []
    for place in found.found:
        worst = [max(measured[_left(place)])]
        rows += [
            Row(place.name, measured[place.name], "s", TARGET_S),
            Row(_left(place), worst, "", 0, note="processes, containers, cgroups; the worst round"),
        ]
    title = f"owner: SIGKILLed, until its {SANDBOXES} sandboxes are gone"
    return [TablePart(title, [*rows, *found.missing])]


async def _killed(plan: Plan, place: BenchBackend) -> Mapping[str, float]:
    async with lender(plan.image, [Stock(place.kind)]) as host:
        await host.order("hold", kind=place.kind, count=SANDBOXES, command=WORK)
        ending = await host.end(signal.SIGKILL)
        await place.backend.sweep()  # as every proxy does at its start
        return {place.name: ending.seconds, _left(place): ending.left + host.cgroups()}


def _left(place: BenchBackend) -> str:
    return f"{place.name}: left after the next sweep"
