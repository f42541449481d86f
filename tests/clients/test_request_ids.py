"""Every answer names its request in `x-request-id`."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.models.scripted import text_reply
from tests.clients.errors import ASKED
from tests.fakes.backend import Refusal, scripted_backend
from tests.fakes.server import running_proxy, single_key

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake-model", "messages": ASKED}
SAID = {"model": "fake-model", "messages": ASKED, "max_tokens": 100}


async def here(request: web.Request) -> web.Response:
    """What the backend has on its other paths."""
    headers = {"X-Request-Id": "of-the-backend"} if request.path == "/v1/named" else {}
    return web.Response(text="here", headers=headers)


async def ask(
    tmp_path: Path, method: str, path: str, headers: dict[str, str] | None = None, **asked: Any
) -> httpx.Response:
    """The answer of a server whose backend answers whatever it is asked."""
    keyring = single_key("sk-right")
    headers = {"authorization": "Bearer sk-right", **(headers or {})}
    async with (
        scripted_backend(lambda _: text_reply("42"), elsewhere=here) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring, passthrough="all") as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        with anyio.fail_after(20):
            return await client.request(method, path, **asked)


@pytest.mark.parametrize(
    ("method", "path", "asked", "status"),
    [
        ("POST", CHAT, {"json": BODY}, 200),
        ("POST", CHAT, {"json": {**BODY, "stream": True}}, 200),
        ("POST", CHAT, {"json": {**BODY, "model": "fake-model:plain"}}, 200),
        ("POST", CHAT, {"json": {**BODY, "model": "fake-model:plain", "stream": True}}, 200),
        ("POST", CHAT, {"content": b"{"}, 400),
        ("POST", CHAT, {"json": BODY, "headers": {"authorization": "Bearer sk-wrong"}}, 401),
        ("GET", CHAT, {}, 405),
        ("POST", "/v1/responses", {"json": {"model": "fake-model", "input": "Hello."}}, 200),
        ("POST", "/v1/messages", {"json": SAID}, 200),
        ("POST", "/v1/messages", {"content": b"{"}, 400),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/v1/files/file-none", {}, 404),
        ("POST", "/v1/embeddings", {"json": {}}, 200),
        ("POST", "/sleep", {}, 403),
        ("GET", "/v1/chat/completions/none", {}, 404),
    ],
)
async def test_every_answer_names_its_request(
    method: str, path: str, asked: dict[str, Any], status: int, tmp_path: Path
) -> None:
    headers = asked.pop("headers", None)
    answer = await ask(tmp_path, method, path, headers, **asked)
    assert answer.status_code == status
    (name,) = answer.headers.get_list("x-request-id")
    assert name.startswith("req_")
    assert len(name) == len("req_") + 32


async def test_the_request_id_of_a_run_is_the_one_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await ask(tmp_path, "POST", CHAT, json=BODY)
    assert answer.headers["x-request-id"] == f"req_{answer.headers['x-sandbox-run']}"


async def test_the_request_id_of_a_failed_run_is_the_one_in_the_log(
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
async def test_anthropic_s_request_id_is_the_same(path: str, tmp_path: Path) -> None:
    answer = await ask(tmp_path, "POST", path, content=b"{")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files/file-none", "/v1/elsewhere"])
async def test_the_client_s_request_id_is_given_back(path: str, tmp_path: Path) -> None:
    answer = await ask(tmp_path, "GET", path, {"X-Request-Id": "trace/1:2"})
    assert answer.headers.get_list("x-request-id") == ["trace/1:2"]


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "caf\u00e9"])
async def test_a_request_id_that_is_long_or_cannot_be_printed_is_not(
    name: str, tmp_path: Path
) -> None:
    headers: Any = {"X-Request-Id": name.encode()}
    answer = await ask(tmp_path, "GET", "/health", headers)
    assert answer.headers["x-request-id"].startswith("req_")


async def test_the_backend_s_own_request_id_is_kept(tmp_path: Path) -> None:
    answer = await ask(tmp_path, "GET", "/v1/named", {"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["of-the-backend"]
