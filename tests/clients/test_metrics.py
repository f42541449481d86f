"""GET /metrics: the backend's numbers and ours, for a Prometheus that knows neither."""

import asyncio
import re
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.keys import Key, Keyring
from proxy.models.scripted import call, text_reply, tool_reply
from sandbox_runtime.pool.pool import Pool
from tests.fakes.backend import Handler, Held, Refusal, scripted_backend
from tests.fakes.server import door_to, house, join, one_key, open_sandboxes, serve

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Work."}]}
THEIRS = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 2.0'
LINE = re.compile(r'(?:# (?:HELP|TYPE) \w.*|[\w:]+(?:\{\w+="[^"]*"\})? [0-9.]+)')


def numbers(answer: httpx.Response) -> dict[str, float]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), answer.text
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    assert len(dict(samples)) == len(samples)
    return {name: float(value) for name, value in samples}


async def test_the_backends_numbers_come_with_ours(tmp_path: Path) -> None:
    asked: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        asked.append(f"{request.path} {request.headers['accept']}")
        return web.Response(text=THEIRS)

    async with (
        scripted_backend([], elsewhere=metrics) as backend,
        house(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(headers={"accept": "application/openmetrics-text"}) as client,
    ):
        found = numbers(await client.get(f"{url}/metrics"))
    assert found['vllm:num_requests_running{engine="0"}'] == 2
    assert found["sandbox_runs_in_flight"] == 0
    assert asked == ["/metrics text/plain; version=0.0.4"]


async def missing(request: web.Request) -> web.Response:
    return web.Response(status=404, text="vllm:lines 1\n")


async def of_another_kind(request: web.Request) -> web.Response:
    return web.json_response({"a": 1})


async def broken(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/plain"})
    await answer.prepare(request)
    await answer.write(b"vllm:half 1\nvllm:ha")
    assert request.transport is not None
    request.transport.close()
    return answer


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/plain"})
    await answer.prepare(request)
    while True:
        await answer.write(b"vllm:line 1\n" * 10_000)


@pytest.mark.parametrize("handler", [missing, of_another_kind, broken, endless])
async def test_a_backend_that_gives_none_leaves_ours(handler: Handler, tmp_path: Path) -> None:
    async with (
        scripted_backend([], elsewhere=handler) as backend,
        house(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):
        found = numbers(await client.get(f"{url}/metrics"))
    assert found["sandbox_runs_in_flight"] == 0
    assert all(name.startswith("sandbox_") for name in found)


async def test_runs_are_counted_by_how_they_end(tmp_path: Path) -> None:
    rest = asyncio.Event()
    script = [
        *[tool_reply(call("submit", answer="42")), text_reply("42"), Refusal(400, "no")],
        *[Held(text_reply("42"), rest), Held(text_reply("42"), asyncio.Event())],
    ]
    async with (
        scripted_backend(script) as backend,
        house(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):

        async def ask() -> None:
            await client.post(f"{url}/v1/chat/completions", json=ASKED)

        with anyio.fail_after(20):
            for _ in range(3):
                await ask()
            staying = asyncio.create_task(ask())
            await backend.arrived(4)
            leaving = asyncio.create_task(ask())
            seen = await backend.arrived(5)
            during = numbers(await client.get(f"{url}/metrics"))
            leaving.cancel()
            rest.set()
            await staying
            await seen.gone.wait()
            await asyncio.wait([leaving])
            while (after := numbers(await client.get(f"{url}/metrics")))["sandbox_runs_in_flight"]:
                pass
    assert during["sandbox_runs_in_flight"] == 2
    ended = {name: value for name, value in after.items() if "runs_total" in name and value}
    assert ended == {
        'sandbox_runs_total{stop_reason="submitted"}': 1,
        'sandbox_runs_total{stop_reason="answered"}': 2,
        'sandbox_runs_total{stop_reason="failed"}': 1,
        'sandbox_runs_total{stop_reason="client_left"}': 1,
    }


async def test_the_pool_is_counted(tmp_path: Path) -> None:
    script = [tool_reply(call("execute_bash", command="true")), text_reply("done")]
    async with (
        scripted_backend(script) as backend,
        open_sandboxes("bubblewrap", tmp_path) as pool,
        httpx.AsyncClient(timeout=20) as client,
    ):
        assert isinstance(pool, Pool)
        model = door_to(backend)
        async with serve(join(model, pool, tmp_path, pool_stats=pool.stats)) as url:
            await client.post(f"{url}/v1/chat/completions", json=ASKED)
            found = numbers(await client.get(f"{url}/metrics"))
        await model.aclose()
    assert found["sandbox_pool_started_total"] == 1
    assert found["sandbox_pool_misses_total"] == 1
    assert found['sandbox_pool_sandboxes{state="lent"}'] == 0
    assert found["sandbox_pool_waiting"] == 0


async def test_the_numbers_are_for_who_has_the_key(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        house(backend, "memory", tmp_path, keyring=one_key("sk-ours")) as url,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"{url}/metrics")).status_code == 401
        assert (await client.get(f"{url}/v1/capabilities")).status_code == 401
        assert (await client.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize(
    ("operator", "sent", "status"),
    [
        (None, "sk-a", 403),
        (None, "sk-wrong", 401),
        ("sk-operator", "sk-a", 403),
        ("sk-operator", "sk-operator", 200),
    ],
)
async def test_with_several_keys_only_the_operators_sees_them(
    operator: str | None, sent: str, status: int, tmp_path: Path
) -> None:
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))], operator=operator)
    headers = {"authorization": f"Bearer {sent}"}
    async with (
        scripted_backend([]) as backend,
        house(backend, "memory", tmp_path, keyring=keyring) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        answer = await client.get("/metrics")
        asked = await client.post("/v1/chat/completions", json=ASKED)
    assert answer.status_code == status
    if status == 403:
        assert "server.operator_key_env" in answer.json()["error"]["message"]
    if sent == operator:
        assert asked.status_code == 401
