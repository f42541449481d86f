"""The HTTP client of `sandbox-eval run`, against real sockets."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from evaluation.http_client import HTTPClient, RequestError
from tests.evaluation.evaluation_process import sandbox_eval, sums
from tests.fakes.backend import scripted_backend

TIMEOUT_S = 30
HEAD = b"HTTP/1.1 200 OK\r\n"
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(conversation: Conversation) -> AsyncIterator[str]:
    """Serve each connection with a function, and yield the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await conversation(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has left
            return
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def client(url: str, timeout_s: float = 60.0) -> HTTPClient:
    return HTTPClient(url, "sk-one", timeout_s)


async def test_http_client_passes_request_and_response_unchanged() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/a%20b?c=%2F HTTP/1.1\r\n")
        assert b"\r\nauthorization: Bearer sk-one\r\n" in head.replace(b"Auth", b"auth")
        body = gzip.compress(await reader.readexactly(len(b'{"one": 1}')) + b" back")
        encoding = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(body)
        writer.write(HEAD + encoding + b"\r\n" + body)

    async with server(echo) as url, client(f"{url}/v1/") as http_client:
        body = await http_client.post_json("/a%20b?c=%2F", {"one": 1})
    assert body == b'{"one": 1} back'


async def test_evaluation_http_client_reuses_an_idle_connection() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")

    async with server(answer) as url, client(url) as http_client:
        bodies = [await http_client.get("/") for _ in range(3)]
    assert (bodies, connections) == ([b"ok"] * 3, 1)


async def test_body_larger_than_max_bytes_is_an_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Content-Length: 4\r\n\r\nfour")

    async with server(answer) as url, client(url) as http_client:
        assert await http_client.get("/", max_bytes=4) == b"four"
        with pytest.raises(RequestError, match="more than 3 bytes") as raised:
            await http_client.get("/", max_bytes=3)
    assert (raised.value.code, raised.value.status) == ("too_large", None)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"error": {"message": "busy", "code": "overloaded"}}', "overloaded", "busy"),
        (b'{"error": {"message": "busy", "code": 503}}', "503", "busy"),
        (b'{"error": {"message": "busy", "code": null}}', "http_503", "busy"),
        (b'{"error": "busy"}', "http_503", '{"error": "busy"}'),
        (b"<html>busy\xff", "http_503", "<html>busy\ufffd"),
        (100_000 * b"[", "http_503", 100_000 * "["),
    ],
)
async def test_error_has_the_code_message_and_headers_of_the_server_response(
    body: bytes, code: str, message: str
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nConnection: close\r\n\r\n" + body)

    async with server(refuse) as url, client(url) as http_client:
        with pytest.raises(RequestError) as raised:
            await http_client.get("/")
    assert (raised.value.code, str(raised.value), raised.value.status) == (code, message, 503)
    assert raised.value.headers.get("retry-after") == "7"


async def test_http_client_does_not_follow_a_redirection() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 307 There\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n")

    async with server(redirect) as url, client(url) as http_client:
        with pytest.raises(RequestError) as raised:
            await http_client.get("/")
    assert (raised.value.code, raised.value.status) == ("http_307", 307)


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 9\r\n\r\npart", b"no HTTP\r\n\r\n"])
async def test_lost_or_malformed_response_is_a_connection_error(sent: bytes) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async with server(break_off) as url, client(url) as http_client:
        with pytest.raises(RequestError) as raised:
            await http_client.get("/")
    assert (raised.value.code, raised.value.status) == ("connection_error", None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[", "models.invalid/v1", ""])
async def test_server_that_cannot_be_reached_is_a_connection_error(url: str) -> None:
    async with client(url) as http_client:
        with pytest.raises(RequestError) as raised:
            await http_client.get("/")
    assert raised.value.code == "connection_error"


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 9\r\n\r\npart"])
async def test_server_that_stops_sending_causes_a_timeout_error(sent: bytes) -> None:
    async def stop_sending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await reader.read()

    async with server(stop_sending) as url, client(url, timeout_s=0.1) as http_client:
        with pytest.raises(RequestError) as raised:
            await http_client.get("/")
    assert raised.value.code == "timeout"


async def test_response_that_does_not_end_causes_a_timeout_error() -> None:
    async def send_spaces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Connection: close\r\n\r\n")
        while not reader.at_eof():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0)

    with anyio.fail_after(TIMEOUT_S):
        async with server(send_spaces) as url, client(url, timeout_s=0.1) as http_client:
            with pytest.raises(RequestError) as raised:
                await http_client.get("/")
    assert (raised.value.code, str(raised.value)) == ("timeout", "no response in time")


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_requests_go_through_the_http_proxy_of_the_environment(
    scheme: str, tmp_path: Path
) -> None:
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
