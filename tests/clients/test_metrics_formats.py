"""The formats of GET /metrics, and the backend metrics in it."""

from pathlib import Path

import httpx
import pytest
from aiohttp import web

from tests.clients.test_metrics import OPENMETRICS, TEXT, numbers
from tests.fakes.backend import Handler, scripted_backend
from tests.fakes.server import running_proxy

BACKEND_METRICS = (
    '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 2.0'
)
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


async def metrics_with_backend(handler: Handler, accept: str, tmp_path: Path) -> httpx.Response:
    async with (
        scripted_backend([], elsewhere=handler) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20, headers={"accept": accept}) as client,
    ):
        return await client.get(f"{url}/metrics")


@pytest.mark.parametrize("accept", ["*/*", "text/plain", PROMETHEUS_ACCEPTS])
async def test_metrics_have_the_backend_text_format_whatever_the_scraper_prefers(
    accept: str, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        asked.append(f"{request.path} {request.headers['accept']}")
        return web.Response(text=BACKEND_METRICS)

    answer = await metrics_with_backend(metrics, accept, tmp_path)
    found = numbers(answer)
    assert answer.headers["content-type"] == TEXT
    assert found['vllm:num_requests_running{engine="0"}'] == 2
    assert found["llm_sandbox_runs_in_flight"] == 0
    preferred = "application/openmetrics-text; version=1.0.0, " if "open" in accept else ""
    quality = "; q=0.5" if "open" in accept else ""
    assert asked == [f"/metrics {preferred}text/plain; version=0.0.4{quality}"]


async def test_openmetrics_of_proxy_and_backend_are_joined(tmp_path: Path) -> None:
    async def metrics(request: web.Request) -> web.Response:
        kind = {"content-type": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
        return web.Response(body=f"{BACKEND_METRICS}\n# EOF\n".encode(), headers=kind)

    answer = await metrics_with_backend(metrics, PROMETHEUS_ACCEPTS, tmp_path)
    found = numbers(answer)
    assert answer.headers["content-type"] == OPENMETRICS
    assert found['vllm:num_requests_running{engine="0"}'] == 2
    assert found["llm_sandbox_runs_in_flight"] == 0


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/json", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        (PROMETHEUS_ACCEPTS, OPENMETRICS),
        ("application/openmetrics-text; version=x; q=y;;=,,", None),
        ("text/plain; version=1e999; escaping=?", None),
    ],
)
async def test_accept_header_selects_the_format_of_the_metrics(
    accept: str, media_type: str | None, tmp_path: Path
) -> None:
    answer = await metrics_with_backend(missing, accept, tmp_path)
    assert "llm_sandbox_runs_in_flight 0.0\n" in answer.text
    assert answer.status_code == 200
    if media_type:
        assert answer.headers["content-type"] == media_type
        assert numbers(answer)["llm_sandbox_runs_in_flight"] == 0


async def missing(request: web.Request) -> web.Response:
    return web.Response(status=404, text="vllm:lines 1\n")


async def json_instead(request: web.Request) -> web.Response:
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


async def truncated(request: web.Request) -> web.Response:
    kind = {"content-type": "application/openmetrics-text; version=1.0.0"}
    return web.Response(body=b"vllm:half 1\nvllm:ha", headers=kind)


@pytest.mark.parametrize("accept", ["text/plain", PROMETHEUS_ACCEPTS])
@pytest.mark.parametrize("handler", [missing, json_instead, broken, endless, truncated])
async def test_broken_backend_metrics_are_left_out(
    handler: Handler, accept: str, tmp_path: Path
) -> None:
    found = numbers(await metrics_with_backend(handler, accept, tmp_path))
    assert found["llm_sandbox_runs_in_flight"] == 0
    assert all(name.startswith(("llm_sandbox_", "sandbox_")) for name in found)
