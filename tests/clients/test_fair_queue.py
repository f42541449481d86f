"""Requests that wait for a sandbox: the keys take turns."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx

from policies.pool import PoolSettings
from proxy.models.scripted import call, tool_reply
from sandbox_runtime.pool.pool import Pool
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.server import AT_ONCE, EachKey, make_services, model_client, serve
from tests.fakes.waiting import until

COMMAND = tool_reply(call("execute_bash", command="true"))
DONE = tool_reply(call("submit", answer="done"))
WAITING = 20


async def test_key_with_many_waiting_runs_delays_another_key_by_one_run_only(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    served: list[str] = []

    def reply(body: dict[str, Any]) -> Item:
        if not any(message["role"] == "assistant" for message in body["messages"]):
            return COMMAND
        # The run has had its sandbox: it is the only one there is.
        served.append(next(m["content"] for m in body["messages"] if m["role"] == "user")[:1])
        return DONE if served[1:] else Held(DONE, release)

    async with scripted_backend(reply) as backend:
        pool = Pool(FakeSandboxBackend(), PoolSettings(min_ready=0, max_sandboxes=1), [])
        model = model_client(backend)
        services = make_services(model, pool, tmp_path, profiles=AT_ONCE, keyring=EachKey())
        async with serve(services) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def ask(key: str) -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": f"{key} asks."}]}
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.json()["choices"][0]["message"]["content"] == "done"

            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(ask, "a")
                    await until(lambda: len(served) == 1)
                    for number in range(1, WAITING + 1):
                        group.start_soon(ask, "a")
                        await until(lambda number=number: pool.stats().waiting == number)
                    group.start_soon(ask, "b")
                    await until(lambda: pool.stats().waiting == WAITING + 1)
                    release.set()
        await pool.aclose()
        await model.aclose()
    assert "".join(served) == "aab" + "a" * (WAITING - 1)
