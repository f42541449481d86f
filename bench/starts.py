"""What a computer costs: from nothing to the end of its first command, and its removal."""

import time
from collections.abc import Mapping
from functools import partial

from bench.places import PlainDocker, places
from bench.plan import Plan, Way, interleave, milliseconds
from bench.table import Part, Row
from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.lending import start_sandbox

ROUNDS = 50
TARGETS_MS = {"docker": 700, "bubblewrap": 150}
PEER = "docker run sleep + docker exec"


async def measure(plan: Plan) -> list[Part]:
    """Every backend beside a container with docker exec."""
    async with places(plan.image) as found:
        ways: dict[str, Way] = {
            name: partial(_ours, name, backend) for name, backend in found.backends.items()
        }
        if "docker" not in ways:
            measured = await interleave(plan.rounds or ROUNDS, ways)
        else:
            plain = PlainDocker(plan.image)
            ways[PEER] = partial(_peer, plain)
            measured = await interleave(plan.rounds or ROUNDS, ways)
            plain.close()
    rows = []
    for name in found.backends:
        first, removal = _names(name)
        rows += [
            Row(first, measured[first], target=TARGETS_MS[name], peers=_names(PEER)[:1]),
            Row(removal, measured[removal], peers=_names(PEER)[1:]),
        ]
    peers = [Row(name, measured[name]) for name in _names(PEER) if name in measured]
    return [Part("starts: nothing there yet", [*rows, *found.missing, *peers])]


def _names(way: str) -> tuple[str, str]:
    return f"{way}: to first `true`", f"{way}: removal"


async def _ours(name: str, backend: Backend) -> Mapping[str, float]:
    first, removal = _names(name)
    started = time.perf_counter()
    sandbox = await start_sandbox(backend, Isolation())
    await sandbox.exec("true", timeout_s=10)
    ready_ms = (time.perf_counter() - started) * 1000
    return {first: ready_ms, removal: await milliseconds(sandbox.close())}


async def _peer(plain: PlainDocker) -> Mapping[str, float]:
    first, removal = _names(PEER)
    started = time.perf_counter()
    container = await plain.run()
    try:
        await plain.exec_by_sdk(container)
        ready_ms = (time.perf_counter() - started) * 1000
    finally:
        removal_ms = await milliseconds(plain.remove(container))
    return {first: ready_ms, removal: removal_ms}
