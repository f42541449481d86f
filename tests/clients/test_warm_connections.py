"""Backend connections stay open during slow commands, so the next turn needs no new one."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.profile import Profile
from proxy.agent.agent import Agent
from proxy.agent.model import Model
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.config import ConfigError, parse
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.retry import RetryingModel
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.runs.manager import RunManager
from proxy.store.runs import RunRepository
from sandbox_runtime.tools import make_tools
from sandbox_runtime.tools.base import Observation, Tool
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy

KEEP_ALIVE_S = 0.8
BODY = {"model": "m", "messages": [{"role": "user", "content": "Work."}]}
REPLIES = [tool_reply(call("execute_bash", command="make")), text_reply("Done.")]


class SlowBash:
    """A bash tool whose command lasts longer than two keep-alive periods."""

    def __init__(self, bash: Tool, backend: ScriptedBackend) -> None:
        self.name = bash.name
        self.schema = bash.schema
        self._backend = backend

    async def run(self, *_: Any, **__: Any) -> Observation:
        await self._backend.probed(3)
        return Observation("slow")


async def answer_after_slow_command(backend: ScriptedBackend, model: Model, state_dir: Path) -> str:
    """Return the answer of a run with one slow command."""

    def make_runs(
        agent: Agent, suspended_runs: SuspendedRunStore, kept: RunRepository
    ) -> RunManager:
        return RunManager(replace(agent, model=model, make_tools=slow_tools), suspended_runs, kept)

    def slow_tools(profile: Profile) -> list[Tool]:
        return [
            SlowBash(tool, backend) if tool.name == "execute_bash" else tool
            for tool in make_tools(profile)
        ]

    with anyio.fail_after(30):
        async with (
            aclosing(model),
            running_proxy(backend, "memory", state_dir, make_runs=make_runs) as url,
            httpx.AsyncClient(timeout=None) as client,
        ):
            response = await client.post(f"{url}/v1/chat/completions", json=BODY)
    return str(response.json()["choices"][0]["message"]["content"])


def model_of(backend: ScriptedBackend) -> Model:
    return RetryingModel(
        OpenAIHTTPModel(backend.base_url, api_key="sk-1", timeout_s=20, keep_alive_s=KEEP_ALIVE_S),
        attempts=1,
    )


async def test_next_turn_reuses_a_connection_kept_warm_during_the_command(
    tmp_path: Path,
) -> None:
    async with scripted_backend(REPLIES) as backend:
        assert await answer_after_slow_command(backend, model_of(backend), tmp_path) == "Done."
    _, second = backend.requests
    assert second.peer in backend.probes


async def test_connection_is_not_kept_warm_after_the_command() -> None:
    async with scripted_backend([text_reply("Hello.")]) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=5, keep_alive_s=0.001)
        async with aclosing(model):
            with anyio.fail_after(20):
                async with model.keep_warm():
                    await backend.probed(2)
                probes = len(backend.probes)
                for _ in range(50):  # each request takes longer than the probe interval
                    await model.models()
            assert len(backend.probes) == probes


async def test_keep_warm_continues_if_the_backend_closes_its_connections() -> None:
    closed = asyncio.Semaphore(0)

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        closed.release()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        model = OpenAIHTTPModel(
            f"http://127.0.0.1:{port}/v1", api_key=None, timeout_s=5, keep_alive_s=0.001
        )
        async with aclosing(model):
            with anyio.fail_after(30):
                async with model.keep_warm():
                    for _ in range(3):
                        await closed.acquire()


@pytest.mark.parametrize("value", [0, 0.5, 3601])
def test_keep_alive_setting_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"backend\.keep_alive_s"):
        parse({"backend": {"keep_alive_s": value}}, "c.yaml")
