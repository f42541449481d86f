"""A Docker engine that restarts under load: runs get an observation or a 503, and the pool
recovers.
"""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.isolation import Isolation
from policies.pool import PoolSettings
from proxy.models.scripted import call, tool_reply
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.pool.pool import Pool
from tests.e2e.leftovers import Engine
from tests.e2e.own_engine import own_engine
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import make_services, model_client, serve
from tests.fakes.waiting import until
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

RUNS = 6
WORK = tool_reply(call("execute_bash", command="echo begun; sleep 600"))
AGAIN = tool_reply(call("execute_bash", command="echo again"))
DONE = tool_reply(call("submit", answer="done"))


@pytest.mark.docker
async def test_run_continues_or_fails_with_a_503_after_an_engine_restart(
    engine: Engine, tmp_path: Path
) -> None:
    async with (
        own_engine() as own,
        scripted_backend(by_history([WORK, AGAIN, DONE])) as backend,
    ):
        docker = DockerBackend(DOCKER_IMAGE, state_dir=tmp_path, host=own.url)
        pool = Pool(docker, PoolSettings(min_ready=2), [])
        model = model_client(backend)
        answers: list[httpx.Response] = []
        async with (
            serve(make_services(model, pool, tmp_path)) as url,
            httpx.AsyncClient() as client,
        ):

            async def ask() -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": "Work."}]}
                path = f"{url}/v1/chat/completions"
                answers.append(await client.post(path, json=body, timeout=120))

            with anyio.fail_after(120):
                async with anyio.create_task_group() as group:
                    for _ in range(RUNS):
                        group.start_soon(ask)
                    await until(lambda: len(own.containers()) >= RUNS)
                    await backend.arrived(RUNS)
                    await own.stop()
                    await own.start()
                await pool_serves(pool)
            # Each run continued after an observation about its loss, or failed with a 503.
            assert {_outcome(answer) for answer in answers} <= {"done", "sandbox_unavailable"}
            assert len(answers) == RUNS
        await pool.aclose()
        with anyio.fail_after(60):
            await until(lambda: not own.containers())
        await docker.aclose()
        await model.aclose()


async def pool_serves(pool: Pool) -> None:
    """Wait until the pool leases a working sandbox."""
    async with pool.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        assert (await sandbox.exec("echo well", timeout_s=20)).stdout == "well\n"


def _outcome(answer: httpx.Response) -> Any:
    body = answer.json()
    if answer.status_code == 503:
        return body["error"]["code"]
    return body["choices"][0]["message"]["content"]
