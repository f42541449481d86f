"""Relayed bodies in both directions, and what happens when either connection breaks."""

import asyncio
import logging
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.models.openai_http import OpenAIHTTPModel
from tests.fakes.backend import Handler, scripted_backend
from tests.fakes.server import make_services, open_sandboxes, running_proxy, serve

MIB = b"x" * (1 << 20)


@asynccontextmanager
async def before(handler: Handler, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        scripted_backend([], elsewhere=handler) as backend,
        running_proxy(backend, "memory", tmp_path, passthrough="all") as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def test_relayed_request_body_is_sent_in_pieces(tmp_path: Path) -> None:
    arrived = asyncio.Event()

    async def receive(request: web.Request) -> web.Response:
        first = await request.content.readany()
        arrived.set()
        return web.Response(body=first + await request.read())

    async def send() -> AsyncIterator[bytes]:
        yield b"first, "
        await arrived.wait()
        yield b"second"

    async with before(receive, tmp_path) as client:
        with anyio.fail_after(10):
            answer = await client.post("/v1/audio/transcriptions", content=send())
    assert answer.content == b"first, second"


@pytest.mark.parametrize("kind", ["text/event-stream", "audio/mpeg", "application/json"])
async def test_relayed_answer_is_sent_in_pieces(kind: str, tmp_path: Path) -> None:
    received = asyncio.Event()

    async def send(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": kind})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await received.wait()
        await answer.write(b"\xff")
        return answer

    async with before(send, tmp_path) as client:
        with anyio.fail_after(10):
            async with client.stream("POST", "/v1/completions", json={}) as answer:
                pieces = []
                async for piece in answer.aiter_raw():
                    pieces.append(piece)
                    received.set()
    assert b"".join(pieces) == b"data: 1\n\n\xff"
    assert answer.headers["content-type"] == kind


async def test_request_and_response_bodies_are_relayed_concurrently(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def echo(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        async for piece in request.content.iter_any():
            await answer.write(piece)
        return answer

    async def send() -> AsyncIterator[bytes]:
        yield b"first, "
        await answered.wait()  # the rest is sent once the first piece is echoed
        yield b"second"

    # httpx sends the complete request before it reads the answer, so use a raw connection.
    async with before(echo, tmp_path) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = (
            "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 13\r\n\r\n"
        )
        writer.write(head.encode())
        with anyio.fail_after(10):
            async for piece in send():
                writer.write(piece)
                if not answered.is_set():
                    await reader.readuntil(b"first, ")
                    answered.set()
            rest = await reader.read()
        writer.close()
    assert b"second" in rest


async def test_relayed_bodies_are_not_buffered(tmp_path: Path) -> None:
    count = 64

    async def echo(request: web.Request) -> web.StreamResponse:
        async for _ in request.content.iter_any():
            pass
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(count):
            await answer.write(MIB)
        return answer

    async def send() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield MIB

    async with before(echo, tmp_path) as client:
        tracemalloc.start()
        try:
            async with client.stream("POST", "/v1/files-of-any-size", content=send()) as answer:
                size = sum([len(piece) async for piece in answer.aiter_raw()])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size == count << 20
    assert peak < 24 << 20


# An end that breaks


class BlockingHandler:
    """A handler that blocks at a chosen point and records its cancellation."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.reached = asyncio.Event()
        self.gone = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        try:
            if self.point == "upload":
                await request.content.readany()
                self.reached.set()
                await request.read()
            elif self.point == "answer":
                await answer.prepare(request)
                await answer.write(b"piece")
            self.reached.set()
            await asyncio.Event().wait()
        finally:
            self.gone.set()
        return answer


@pytest.mark.parametrize("point", ["upload", "thought", "answer"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_client_disconnect_cancels_the_backend_request(
    point: str, method: str, tmp_path: Path
) -> None:
    backend = BlockingHandler(point)

    async def send() -> AsyncIterator[bytes]:
        yield b"x"
        if point == "upload":
            await asyncio.Event().wait()

    async with before(backend.handle, tmp_path) as client:
        content = send() if method == "POST" or point == "upload" else None
        asking = asyncio.create_task(client.request(method, "/v1/videos", content=content))
        with anyio.fail_after(10):
            await backend.reached.wait()
            asking.cancel()
            await backend.gone.wait()
        await asyncio.wait([asking])


async def test_relayed_request_to_an_unreachable_backend_is_a_502(tmp_path: Path) -> None:
    async with (
        aclosing(OpenAIHTTPModel("http://127.0.0.1:1/v1", api_key=None, timeout_s=5)) as model,
        open_sandboxes("memory", tmp_path) as sandboxes,
        serve(make_services(model, sandboxes, tmp_path, passthrough="all")) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        answers: list[Any] = [
            await client.post("/v1/embeddings", json={"model": "m"}),
            await client.get("/version"),
            await client.put("/v1/evals", content=MIB),
        ]
    assert [answer.status_code for answer in answers] == [502] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"backend_unreachable"}


async def test_relayed_request_is_not_retried(tmp_path: Path) -> None:
    seen: list[str] = []

    async def hang_up(request: web.Request) -> web.Response:
        seen.append(request.path)
        if request.path != "/ping" and request.transport is not None:
            request.transport.close()
        return web.Response()

    async with before(hang_up, tmp_path) as client:
        await client.get("/ping")  # the next request reuses this connection
        posted = await client.post("/v1/completions", json={"model": "m"})
        await client.get("/ping")
        streamed = await client.put("/v1/evals", content=aiter_of(b"a", b"b"))
    assert (posted.status_code, streamed.status_code) == (502, 502)
    assert seen == ["/ping", "/v1/completions", "/ping", "/v1/evals"]


async def test_truncated_relayed_answer_does_not_look_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return answer

    async with before(break_off, tmp_path) as client:
        with caplog.at_level(logging.WARNING), pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json={})
    assert "a relayed answer broke off" in caplog.text
    assert "Traceback" not in caplog.text


async def test_backend_refusal_sent_before_the_request_body_was_read_is_relayed(
    tmp_path: Path,
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too large"}}, status=413)

    async with before(refuse, tmp_path) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = "PUT /v1/videos HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
        with anyio.fail_after(10):
            writer.write(head.encode() + b"a few")
            status = await reader.readline()
        writer.close()
    assert status.split()[1] == b"413"


async def aiter_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
