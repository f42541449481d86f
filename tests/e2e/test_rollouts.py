"""Many rollouts at once; also while the proxy is killed and starts again."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from bench.servers import free_port
from tests.clients.chat_http import http_client
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, by_history, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.training.test_rollouts import READ, RIGHT, exact, task
from training.rollouts import RolloutClient, Segment

ROLLOUTS, AT_ONCE = 64, 16
CALLS = 2
"""Model calls of one run."""
CONFIG: dict[str, Any] = {
    "profiles": {"default": {"agent": {"capture_tokens": True}}},
    "sandbox": {"docker": {"image": DOCKER_IMAGE}, "pool": {"max_sandboxes": ROLLOUTS}},
}


@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_64_concurrent_rollouts_with_a_sandbox_each_all_succeed(
    kind: Kind, tmp_path: Path
) -> None:
    rows = [task(f"port-{number}") for number in range(ROLLOUTS)]
    all_have_read = asyncio.Event()
    script = by_history([READ, Held(RIGHT, until=all_have_read)])
    async with (
        scripted_backend(script, has_tokens=True) as backend,
        serving(tmp_path, kind, backend.base_url, CONFIG) as server,
        http_client(server.url) as http,
    ):
        base_url = f"{server.url}/v1"
        client = RolloutClient(base_url, backend.model, score=exact, concurrency=ROLLOUTS)
        with anyio.fail_after(180):
            running = asyncio.create_task(client.run(rows))
            await backend.arrived(CALLS * ROLLOUTS)
            metrics = (await http.get("/metrics")).text
            all_have_read.set()
            rollouts = await running
    assert f'llm_sandbox_pool_sandboxes{{state="in_use"}} {ROLLOUTS}.0' in metrics.splitlines()
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
            async with (
                serving(tmp_path, kind, backend.base_url, CONFIG, port=port) as second,
                http_client(second.url) as http,
            ):
                rollouts = await running
                stored = [
                    (await http.get(f"/v1/runs/{each.trajectory_id}/trajectory")).json()
                    for each in rollouts
                ]
    assert [each.task_id for each in rollouts] == [row.id for row in rows]
    assert {each.reward for each in rollouts} == {1.0}
    assert {len(each.segments) for each in rollouts} == {1}
    assert len({each.trajectory_id for each in rollouts}) == ROLLOUTS
    assert len(backend.requests) <= CALLS * (ROLLOUTS + AT_ONCE)
    assert [each["task_id"] for each in stored] == [row.id for row in rows]
    assert {each["outcome"] for each in stored} == {"answered"}
    assert [[given["value"] for given in each["rewards"]] for each in stored] == [[1.0]] * ROLLOUTS
    for rollout, trajectory in zip(rollouts, stored, strict=True):
        (segment,) = (Segment(**each) for each in trajectory["token_segments"])
        assert (segment,) == rollout.segments
        assert 0 < segment.sampled_count < len(segment.response_ids) == len(segment.logprobs)
