"""The HTTP transport of `sandbox-eval run`, against real sockets."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from evaluation.aiohttp_transport import AiohttpTransport
from tests.evaluation.evaluation_process import sandbox_eval, sums
from tests.fakes.backend import scripted_backend

HEAD = b"HTTP/1.1 200 OK\r\n"
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(conversation: Conversation) -> AsyncIterator[str]:
    """Serve each connection with a function, and yield the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await conversation(reader, writer)
        except asyncio.IncompleteReadError:  # the client has left
            return
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def client(timeout_s: float = 60.0) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=AiohttpTransport(), timeout=timeout_s)


async def test_request_and_response_pass_unchanged() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /a%20b?c=%2F HTTP/1.1\r\n")
        assert b"\r\nx-key: one\r\n" in head.lower()
        body = gzip.compress(await reader.readexactly(4) + b" back")
        encoding = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(body)
        writer.write(HEAD + b"X-Twice: 1\r\nX-Twice: 2\r\n" + encoding + b"\r\n" + body)

    async with server(echo) as url, client() as http_client:
        response = await http_client.post(
            f"{url}/a%20b?c=%2F", headers={"X-Key": "one"}, content=b"body"
        )
    assert (response.status_code, response.text) == (200, "body back")
    assert response.reason_phrase == "OK"
    assert response.headers.get_list("x-twice") == ["1", "2"]


async def test_connection_is_used_again_after_its_response_was_read() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")

    async with server(answer) as url, client() as http_client:
        texts = [(await http_client.get(url)).text for _ in range(3)]
        assert (texts, connections) == (["ok"] * 3, 1)
        async with http_client.stream("GET", url):
            pass  # the body is not read
        assert (await http_client.get(url)).text == "ok"


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 9\r\n\r\npart", b"no HTTP\r\n\r\n"])
async def test_lost_or_malformed_response_is_a_network_error(sent: bytes) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async with server(break_off) as url, client() as http_client:
        with pytest.raises(httpx.NetworkError):
            await http_client.get(url)


async def test_refused_connection_is_a_network_error() -> None:
    async with client() as http_client:
        with pytest.raises(httpx.NetworkError):
            await http_client.get("http://127.0.0.1:9")


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 9\r\n\r\npart"])
async def test_silent_server_is_a_timeout(sent: bytes) -> None:
    async def stop_sending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await reader.read()

    async with server(stop_sending) as url, client(timeout_s=0.1) as http_client:
        with pytest.raises(httpx.TimeoutException):
            await http_client.get(url)


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_proxy_of_the_environment_gets_the_requests(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the extra `evaluation` is not installed")
    sums(tmp_path / "data")
    command = ("run", "--output", tmp_path / "output", "--data", tmp_path / "data")
    options = ("--models", "m", "--base-url", "http://models.invalid/v1")
    async with scripted_backend([], model="served-model") as proxy:
        address = f"{scheme}{proxy.base_url.removeprefix('http://')}"
        ended = await sandbox_eval(*command, *options, http_proxy=address, no_proxy="")
    assert ended.stderr.endswith(
        "The proxy does not serve the model m:plain. Its models: served-model\n"
    )
