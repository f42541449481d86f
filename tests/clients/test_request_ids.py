"""The `x-request-id` header of every answer."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.models.scripted import text_reply
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Refusal, scripted_backend
from tests.fakes.server import running_proxy, single_key

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake-model", "messages": MESSAGES}
MESSAGES_BODY = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 100}


async def any_path(request: web.Request) -> web.Response:
    """Answer any other backend path; /v1/named adds a request id of its own."""
    headers = {"X-Request-Id": "of-the-backend"} if request.path == "/v1/named" else {}
    return web.Response(text="here", headers=headers)


async def send(
    tmp_path: Path, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
) -> httpx.Response:
    """Return the answer of a server whose backend answers every request."""
    keyring = single_key("sk-right")
    headers = {"authorization": "Bearer sk-right", **(headers or {})}
    async with (
        scripted_backend(lambda _: text_reply("42"), elsewhere=any_path) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring, passthrough="all") as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        with anyio.fail_after(20):
            return await client.request(method, path, **options)


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", CHAT, {"json": BODY}, 200),
        ("POST", CHAT, {"json": {**BODY, "stream": True}}, 200),
        ("POST", CHAT, {"json": {**BODY, "model": "fake-model:plain"}}, 200),
        ("POST", CHAT, {"json": {**BODY, "model": "fake-model:plain", "stream": True}}, 200),
        ("POST", CHAT, {"content": b"{"}, 400),
        ("POST", CHAT, {"json": BODY, "headers": {"authorization": "Bearer sk-wrong"}}, 401),
        ("GET", CHAT, {}, 405),
        ("POST", "/v1/responses", {"json": {"model": "fake-model", "input": "Hello."}}, 200),
        ("POST", "/v1/messages", {"json": MESSAGES_BODY}, 200),
        ("POST", "/v1/messages", {"content": b"{"}, 400),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/v1/files/file-none", {}, 404),
        ("POST", "/v1/embeddings", {"json": {}}, 200),
        ("POST", "/sleep", {}, 403),
        ("GET", "/v1/chat/completions/none", {}, 404),
    ],
)
async def test_every_answer_has_a_request_id(
    method: str, path: str, options: dict[str, Any], status: int, tmp_path: Path
) -> None:
    headers = options.pop("headers", None)
    answer = await send(tmp_path, method, path, headers, **options)
    assert answer.status_code == status
    (name,) = answer.headers.get_list("x-request-id")
    assert name.startswith("req_")
    assert len(name) == len("req_") + 32


async def test_request_id_contains_the_run_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await send(tmp_path, "POST", CHAT, json=BODY)
    assert answer.headers["x-request-id"] == f"req_{answer.headers['x-sandbox-run']}"


async def test_request_id_of_a_failed_run_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        scripted_backend([Refusal(400, "no")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        with anyio.fail_after(20):
            answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 400
    assert f"run {answer.headers['x-request-id'].removeprefix('req_')} failed" in caplog.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches/none/cancel"])
async def test_anthropic_request_id_header_equals_the_request_id(path: str, tmp_path: Path) -> None:
    answer = await send(tmp_path, "POST", path, content=b"{")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files/file-none", "/v1/elsewhere"])
async def test_client_request_id_is_returned(path: str, tmp_path: Path) -> None:
    answer = await send(tmp_path, "GET", path, {"X-Request-Id": "trace/1:2"})
    assert answer.headers.get_list("x-request-id") == ["trace/1:2"]


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "caf\u00e9"])
async def test_invalid_client_request_id_is_replaced(name: str, tmp_path: Path) -> None:
    headers: Any = {"X-Request-Id": name.encode()}
    answer = await send(tmp_path, "GET", "/health", headers)
    assert answer.headers["x-request-id"].startswith("req_")


async def test_backend_request_id_is_kept(tmp_path: Path) -> None:
    answer = await send(tmp_path, "GET", "/v1/named", {"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["of-the-backend"]
