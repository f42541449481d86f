"""/v1/messages for `:plain` models, and token counting at the backend."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.models.scripted import ScriptedModel
from tests.clients.messages_http import BODY, CODE_EXECUTION, PATH, TEMPERATURE_TOOL
from tests.fakes.backend import scripted_backend
from tests.fakes.server import make_services, open_sandboxes, running_proxy, serve

COUNT_PATH = f"{PATH}/count_tokens"
COUNT_BODY = {"model": "fake-model", "messages": BODY["messages"]}


@dataclass
class BackendPaths:
    """Backend paths with fixed answers; every other path is a 404."""

    answers: dict[str, Any]
    status: int = 200
    seen: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    encodings: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.json()))
        self.keys.append(request.headers.get("x-api-key"))
        self.encodings.append(request.headers.get("accept-encoding", ""))
        if request.path not in self.answers:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.answers[request.path], status=self.status)


@asynccontextmanager
async def relay_client(server: BackendPaths, state_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve in front of the given backend paths and yield a client."""
    with anyio.fail_after(20):
        async with (
            scripted_backend([], elsewhere=server.answer) as backend,
            running_proxy(backend, "memory", state_dir) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as client,
        ):
            yield client


async def test_messages_request_for_a_plain_model_is_relayed_to_the_backend(tmp_path: Path) -> None:
    server = BackendPaths({PATH: {"id": "msg_backend"}})
    body = {**BODY, "model": "fake-model:plain", "messages": "as the backend likes"}
    async with relay_client(server, tmp_path) as client:
        response = await client.post(
            f"{PATH}?beta=true", json=body, headers={"x-api-key": "sk-ours"}
        )
    assert (response.status_code, response.json()) == (200, {"id": "msg_backend"})
    assert server.seen == [(PATH, {**body, "model": "fake-model"})]
    assert server.keys == [None]


async def test_plain_stream_is_relayed_unchanged(tmp_path: Path) -> None:
    frames = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(frames)
        await response.write_eof()
        return response

    async with (
        scripted_backend([], elsewhere=stream) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        with anyio.fail_after(10):
            body = {**BODY, "model": "fake-model:plain", "stream": True}
            response = await client.post(PATH, json=body)
    assert response.content == frames


async def test_tokens_are_counted_by_the_count_tokens_endpoint_of_the_backend(
    tmp_path: Path,
) -> None:
    server = BackendPaths({COUNT_PATH: {"input_tokens": 7}})
    body = {**COUNT_BODY, "tools": [CODE_EXECUTION, TEMPERATURE_TOOL], "sandbox": {"steps": "off"}}
    async with relay_client(server, tmp_path) as client:
        response = await client.post(COUNT_PATH, json=body)
    assert response.json() == {"input_tokens": 7}
    assert server.seen == [(COUNT_PATH, {**COUNT_BODY, "tools": [TEMPERATURE_TOOL]})]


async def test_tokens_are_counted_with_the_tokenize_endpoint_if_the_backend_has_no_count_tokens(
    tmp_path: Path,
) -> None:
    server = BackendPaths({"/tokenize": {"count": 9, "tokens": [1] * 9, "max_model_len": 4096}})
    async with relay_client(server, tmp_path) as client:
        response = await client.post(COUNT_PATH, json={**COUNT_BODY, "system": "Be brief."})
    assert response.json() == {"input_tokens": 9}
    messages = [{"role": "system", "content": "Be brief."}, *BODY["messages"]]
    assert server.seen[1] == ("/tokenize", {"model": "fake-model", "messages": messages})


async def test_files_are_excluded_from_the_token_count(tmp_path: Path) -> None:
    server = BackendPaths({"/tokenize": {"count": 9}})
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    document = {"type": "document", "source": pdf}
    see = {"type": "text", "text": "See."}
    body = {**COUNT_BODY, "messages": [{"role": "user", "content": [document, see]}]}
    async with relay_client(server, tmp_path) as client:
        response = await client.post(COUNT_PATH, json=body)
    assert response.json() == {"input_tokens": 9}
    assert server.seen[1][1]["messages"] == [{"role": "user", "content": [see]}]
    assert "gzip" not in server.encodings[1]


@pytest.mark.parametrize("answers", [{}, {"/tokenize": {"tokens": "many"}}, {"/tokenize": []}])
async def test_token_count_without_backend_support_is_a_404(answers: Any, tmp_path: Path) -> None:
    async with relay_client(BackendPaths(answers), tmp_path) as client:
        response = await client.post(COUNT_PATH, json=COUNT_BODY)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert error["message"].startswith("Tokens cannot be counted")


async def test_backend_error_for_a_token_count_is_relayed(tmp_path: Path) -> None:
    server = BackendPaths({COUNT_PATH: {"type": "error"}}, status=400)
    async with relay_client(server, tmp_path) as client:
        response = await client.post(COUNT_PATH, json=COUNT_BODY)
    assert (response.status_code, response.json()) == (400, {"type": "error"})


async def test_token_count_request_for_a_plain_model_is_relayed(tmp_path: Path) -> None:
    server = BackendPaths({COUNT_PATH: {"input_tokens": 5}})
    async with relay_client(server, tmp_path) as client:
        response = await client.post(COUNT_PATH, json={**COUNT_BODY, "model": "fake-model:plain"})
    assert response.json() == {"input_tokens": 5}
    assert server.seen == [(COUNT_PATH, COUNT_BODY)]


async def test_token_count_is_a_404_if_the_backend_is_no_http_server(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        async with open_sandboxes("memory", tmp_path) as sandboxes:
            services = make_services(ScriptedModel([]), sandboxes, tmp_path)
            async with serve(services) as url, httpx.AsyncClient(base_url=url) as client:
                response = await client.post(COUNT_PATH, content=json.dumps(COUNT_BODY))
    assert response.status_code == 404
