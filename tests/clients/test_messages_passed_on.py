"""Messages for `:plain` models, and the counting of tokens: what the backend is asked for."""

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
from tests.clients.messages import ASKED, COMPUTER, PATH, WARMTH
from tests.fakes.backend import scripted_backend
from tests.fakes.server import make_services, open_sandboxes, running_proxy, serve

COUNT = f"{PATH}/count_tokens"
COUNTED = {"model": "fake-model", "messages": ASKED["messages"]}


@dataclass
class Server:
    """A backend's other paths, each with its answer; the rest is not there."""

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
async def before(server: Server, state_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the house before that server."""
    with anyio.fail_after(20):
        async with (
            scripted_backend([], elsewhere=server.answer) as backend,
            running_proxy(backend, "memory", state_dir) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as client,
        ):
            yield client


async def test_a_plain_models_message_is_the_backends_own(tmp_path: Path) -> None:
    server = Server({PATH: {"id": "msg_backend"}})
    asked = {**ASKED, "model": "fake-model:plain", "messages": "as the backend likes"}
    async with before(server, tmp_path) as client:
        response = await client.post(
            f"{PATH}?beta=true", json=asked, headers={"x-api-key": "sk-ours"}
        )
    assert (response.status_code, response.json()) == (200, {"id": "msg_backend"})
    assert server.seen == [(PATH, {**asked, "model": "fake-model"})]
    assert server.keys == [None]


async def test_a_plain_models_stream_is_passed_on_as_it_comes(tmp_path: Path) -> None:
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
            asked = {**ASKED, "model": "fake-model:plain", "stream": True}
            response = await client.post(PATH, json=asked)
    assert response.content == frames


async def test_tokens_are_counted_by_a_backend_that_speaks_the_dialect(tmp_path: Path) -> None:
    server = Server({COUNT: {"input_tokens": 7}})
    asked = {**COUNTED, "tools": [COMPUTER, WARMTH], "sandbox": {"steps": "off"}}
    async with before(server, tmp_path) as client:
        response = await client.post(COUNT, json=asked)
    assert response.json() == {"input_tokens": 7}
    assert server.seen == [(COUNT, {**COUNTED, "tools": [WARMTH]})]


async def test_else_they_are_counted_as_it_tokenizes_the_same_chat(tmp_path: Path) -> None:
    server = Server({"/tokenize": {"count": 9, "tokens": [1] * 9, "max_model_len": 4096}})
    async with before(server, tmp_path) as client:
        response = await client.post(COUNT, json={**COUNTED, "system": "Be brief."})
    assert response.json() == {"input_tokens": 9}
    told = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    assert server.seen[1] == ("/tokenize", {"model": "fake-model", "messages": told})


async def test_files_are_not_counted_but_what_is_beside_them(tmp_path: Path) -> None:
    server = Server({"/tokenize": {"count": 9}})
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    document = {"type": "document", "source": pdf}
    see = {"type": "text", "text": "See."}
    asked = {**COUNTED, "messages": [{"role": "user", "content": [document, see]}]}
    async with before(server, tmp_path) as client:
        response = await client.post(COUNT, json=asked)
    assert response.json() == {"input_tokens": 9}
    assert server.seen[1][1]["messages"] == [{"role": "user", "content": [see]}]
    assert "gzip" not in server.encodings[1]


@pytest.mark.parametrize("answers", [{}, {"/tokenize": {"tokens": "many"}}, {"/tokenize": []}])
async def test_else_the_client_is_told_that_nobody_can(answers: Any, tmp_path: Path) -> None:
    async with before(Server(answers), tmp_path) as client:
        response = await client.post(COUNT, json=COUNTED)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert error["message"].startswith("Tokens cannot be counted")


async def test_a_backend_that_will_not_count_says_so_itself(tmp_path: Path) -> None:
    server = Server({COUNT: {"type": "error"}}, status=400)
    async with before(server, tmp_path) as client:
        response = await client.post(COUNT, json=COUNTED)
    assert (response.status_code, response.json()) == (400, {"type": "error"})


async def test_a_plain_models_tokens_are_the_backends_to_count(tmp_path: Path) -> None:
    server = Server({COUNT: {"input_tokens": 5}})
    async with before(server, tmp_path) as client:
        response = await client.post(COUNT, json={**COUNTED, "model": "fake-model:plain"})
    assert response.json() == {"input_tokens": 5}
    assert server.seen == [(COUNT, COUNTED)]


async def test_a_backend_that_is_no_server_counts_nothing(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        async with open_sandboxes("memory", tmp_path) as sandboxes:
            services = make_services(ScriptedModel([]), sandboxes, tmp_path)
            async with serve(services) as url, httpx.AsyncClient(base_url=url) as client:
                response = await client.post(COUNT, content=json.dumps(COUNTED))
    assert response.status_code == 404
