"""`serve` and `doctor` with several Docker engines, and a run whose engine is lost."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.pool import PoolSettings
from proxy.metrics import Metrics
from proxy.models.scripted import call, tool_reply
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_hosts import DockerHost, DockerHosts
from sandbox_runtime.pool.pool import Pool
from tests.e2e.leftovers import Engine
from tests.e2e.proxy_process import run, serving, write_config
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.server import make_services, model_client, serve
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.relay import SOCKET, relay
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

pytestmark = pytest.mark.docker

SHARED, NOWHERE = f"unix://{SOCKET}", "unix:///nonexistent/docker.sock"
BOTH = {"image": DOCKER_IMAGE, "hosts": [{"url": SHARED}, {"url": NOWHERE}]}
NEITHER = {"image": DOCKER_IMAGE, "hosts": [{"url": NOWHERE}, {"url": f"{NOWHERE}2"}]}
KEEP = tool_reply(call("execute_bash", command="echo kept > note"))
READ = tool_reply(call("execute_bash", command="cat note"))
WORK = tool_reply(call("execute_bash", command="sleep 600"))
AGAIN = tool_reply(call("execute_bash", command="echo again"))
DONE = tool_reply(call("submit", answer="done"))


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


async def ask(client: httpx.AsyncClient, text: str = "Work.") -> str:
    answer = await client.post("/v1/chat/completions", json=body(text))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_serve_starts_if_only_one_of_two_engines_answers(
    engine: Engine, tmp_path: Path
) -> None:
    command = tool_reply(call("execute_bash", command="echo well"))
    more = {"sandbox": {"docker": BOTH, "pool": {"min_ready": 1}}}
    async with (
        scripted_backend([command, DONE]) as backend,
        serving(tmp_path, "docker", backend.base_url, more) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        assert f"{NOWHERE} gets no sandboxes: no Docker engine answers" in server.log
        assert await ask(client) == "done"
        metrics = (await client.get("/metrics")).text
    assert f'llm_sandbox_docker_host_up{{host="{SHARED}"}} 1.0' in metrics
    assert f'llm_sandbox_docker_host_up{{host="{NOWHERE}"}} 0.0' in metrics
    assert f'llm_sandbox_docker_host_sandboxes{{host="{NOWHERE}"}} 0.0' in metrics
    assert "well" in backend.requests[1].body["messages"][-1]["content"]


@pytest.mark.parametrize("setting", ["auto", "docker"])
async def test_serve_fails_if_no_engine_answers(setting: str, tmp_path: Path) -> None:
    tree = {"sandbox": {"backend": setting, "docker": NEITHER}}
    config = write_config(tmp_path, tree)
    done = await run(tmp_path, "serve", "--port", "0", "--config", config)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("sandbox-proxy: no Docker engine can be used: unix:///nonexistent/")


async def test_doctor_checks_each_engine(engine: Engine, tmp_path: Path) -> None:
    async with scripted_backend([]) as backend:
        for docker, code, mark in ((BOTH, 0, "--  "), (NEITHER, 1, "FAIL")):
            config = write_config(tmp_path, {"sandbox": {"docker": docker}})
            where = ("--config", config, "--backend-url", backend.base_url)
            done = await run(tmp_path, "doctor", *where)
            lines = done.stdout.decode().splitlines()
            missing = f"{mark}  docker engine: {NOWHERE}: no Docker engine answers at {NOWHERE}"
            assert any(line.startswith(missing) for line in lines)
            found = any(line.startswith(f"ok    docker sandbox: {SHARED}: 42") for line in lines)
            assert (done.returncode, found) == (code, code == 0)


async def test_gc_command_sweeps_the_reachable_engine_and_reports_the_unreachable_one(
    engine: Engine, tmp_path: Path
) -> None:
    config = write_config(tmp_path, {"sandbox": {"docker": BOTH}})
    done = await run(tmp_path, "gc", "--config", config)
    assert (done.returncode, done.stdout) == (0, b"ok    docker: 0 removed\n")
    assert NOWHERE.encode() in done.stderr


async def test_run_continues_at_another_engine_when_its_engine_is_lost(
    engine: Engine, tmp_path: Path
) -> None:
    release = asyncio.Event()

    def reply(body: dict[str, Any]) -> Item:
        messages = body["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        is_kept = any(message["content"] == "Keep." for message in messages)
        return ((KEEP, Held(READ, release), DONE) if is_kept else (WORK, AGAIN, DONE))[turn]

    async with relay() as line, scripted_backend(reply) as backend:
        lost_url = f"tcp://127.0.0.1:{line.port}"
        hosts = DockerHosts(
            [
                DockerHost(
                    url, partial(DockerBackend, DOCKER_IMAGE, state_dir=tmp_path, host=url), 10
                )
                for url in (SHARED, lost_url)
            ]
        )
        pool = Pool(hosts, PoolSettings(min_ready=0), [])
        model, metrics = model_client(backend), Metrics()
        metrics.register_host_stats(hosts.stats)
        services = make_services(model, pool, tmp_path, metrics=metrics)
        with anyio.fail_after(120):
            async with (
                serve(services) as url,
                httpx.AsyncClient(base_url=url, timeout=90) as client,
            ):
                keeping = asyncio.create_task(ask(client, "Keep."))
                await backend.arrived(2)
                working = asyncio.create_task(ask(client, "Work."))
                await until(lambda: "sleep 600" in processes(engine, tmp_path))
                assert [each.sandboxes for each in hosts.stats()] == [1, 1]
                line.cut()
                assert await working == "done"
                assert [each.is_up for each in hosts.stats()] == [True, False]
                metrics_text = (await client.get("/metrics")).text
                release.set()
                assert await keeping == "done"
            await pool.aclose()
            await hosts.aclose()
            await model.aclose()
    observations = [
        message["content"]
        for request in backend.requests
        for message in request.body["messages"]
        if message["role"] == "tool"
    ]
    assert any("the engine closed the connection" in text for text in observations)
    assert any("again" in text for text in observations)
    assert any("kept" in text for text in observations)
    assert f'llm_sandbox_docker_host_up{{host="{lost_url}"}} 0.0' in metrics_text


def processes(engine: Engine, state_dir: Path) -> str:
    """Return the command lines in the sandboxes."""
    return str([engine.client.top(id)["Processes"] for id in engine.running(state_dir)])
