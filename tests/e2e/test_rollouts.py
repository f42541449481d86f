"""Many rollouts at once; also while the proxy is killed and starts again."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from bench.servers import free_port
from tests.e2e.proxy_process import serving
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind
from tests.training.test_rollouts import READ, RIGHT, exact, task
from training.rollouts import RolloutClient

ROLLOUTS, AT_ONCE = 64, 16
CALLS = 2
"""Model calls of one run."""
CONFIG: dict[str, Any] = {
    "profiles": {"default": {"agent": {"capture_tokens": True}}},
}


@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_no_rollout_is_lost_if_many_run_at_once(kind: Kind, tmp_path: Path) -> None:
    rows = [task(f"port-{number}") for number in range(ROLLOUTS)]
    async with (
        scripted_backend(by_history([READ, RIGHT]), has_tokens=True) as backend,
        serving(tmp_path, kind, backend.base_url, CONFIG) as server,
    ):
        base_url = f"{server.url}/v1"
        client = RolloutClient(base_url, backend.model, score=exact, concurrency=ROLLOUTS)
        with anyio.fail_after(180):
            rollouts = await client.run(rows)
    assert {(each.outcome, each.reward) for each in rollouts} == {("answered", 1.0)}
    assert len(backend.requests) == CALLS * ROLLOUTS


@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_rollout_client_repeats_only_unfinished_runs_when_the_proxy_dies(
    kind: Kind, tmp_path: Path
) -> None:
    rows = [task(f"port-{number}") for number in range(ROLLOUTS)]
    port = free_port()
    async with scripted_backend(by_history([READ, RIGHT]), has_tokens=True) as backend:
        client = RolloutClient(
            f"http://127.0.0.1:{port}/v1", backend.model, score=exact, concurrency=AT_ONCE
        )
        with anyio.fail_after(180):
            async with serving(tmp_path, kind, backend.base_url, CONFIG, port=port) as first:
                running = asyncio.create_task(client.run(rows))
                await backend.arrived(CALLS * ROLLOUTS // 2)
                first.process.kill()
                await first.ended()
            async with serving(tmp_path, kind, backend.base_url, CONFIG, port=port):
                rollouts = await running
    assert [each.task_id for each in rollouts] == [row.id for row in rows]
    assert {each.reward for each in rollouts} == {1.0}
    assert {len(each.segments) for each in rollouts} == {1}
    assert len({each.trajectory_id for each in rollouts}) == ROLLOUTS
    assert len(backend.requests) <= CALLS * (ROLLOUTS + AT_ONCE)
