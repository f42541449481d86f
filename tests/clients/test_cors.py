"""CORS: requests from web pages, with and without a key."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.keys import Keyring
from proxy.models.scripted import text_reply
from tests.clients.chat_http import post_chat
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy, single_key

CHAT = "/v1/chat/completions"
FOREIGN_ORIGIN = "https://app.example"
HEADERS = "authorization, content-type, x-stainless-lang"
KEY = {"Authorization": "Bearer sk-ours"}


async def allow_any_origin(_: web.Request) -> web.Response:
    return web.json_response({}, headers={"Access-Control-Allow-Origin": "*"})


@asynccontextmanager
async def served(
    state_dir: Path, key: str | None, **parts: Any
) -> AsyncIterator[httpx.AsyncClient]:
    keyring = single_key(key) if key else Keyring()
    async with (
        scripted_backend(lambda body: text_reply("Well."), elsewhere=allow_any_origin) as backend,
        running_proxy(backend, "memory", state_dir, keyring=keyring, **parts) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def preflight(client: httpx.AsyncClient, origin: str) -> httpx.Response:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": HEADERS}
    return await client.options(CHAT, headers={"Origin": origin, **wanted})


def allowed_origin(headers: Mapping[str, str]) -> str | None:
    return headers.get("access-control-allow-origin")


async def test_any_origin_is_allowed_if_a_key_is_required(tmp_path: Path) -> None:
    origin = {"Origin": FOREIGN_ORIGIN}
    async with served(tmp_path, "sk-ours") as client:
        preflight_answer = await preflight(client, FOREIGN_ORIGIN)
        answers = [
            await post_chat(client, {**origin, **KEY}),
            await post_chat(client, {**origin, **KEY}, stream=True),
            await post_chat(client, origin),
            await client.get("/version", headers={**origin, **KEY}),
        ]
    assert (preflight_answer.status_code, allowed_origin(preflight_answer.headers)) == (200, "*")
    assert preflight_answer.headers["access-control-allow-headers"] == HEADERS
    assert "DELETE" in preflight_answer.headers["access-control-allow-methods"]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 200]
    assert [allowed_origin(answer.headers) for answer in answers] == ["*"] * 4
    assert answers[0].headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8"])
async def test_local_origin_is_allowed_without_a_key(origin: str, tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        preflight_answer = await preflight(client, origin)
        answer = await post_chat(client, {"Origin": origin})
    assert (preflight_answer.status_code, allowed_origin(preflight_answer.headers)) == (200, origin)
    assert (answer.status_code, allowed_origin(answer.headers)) == (200, origin)


@pytest.mark.parametrize(
    "origin", [FOREIGN_ORIGIN, "http://localhost.app.example", "null", "http://[::1", "http://a:b"]
)
async def test_foreign_origin_is_refused_if_no_key_is_required(origin: str, tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        preflight_answer = await preflight(client, origin)
        # Neither a simple request, which needs no preflight, nor one to a host name of the
        # page's site that resolves to this machine.
        simple = {"Origin": origin, "Content-Type": "text/plain"}
        rebound = {"Origin": origin, "Host": origin.removeprefix("https://")}
        refused = [await post_chat(client, headers) for headers in (simple, rebound)]
        refused.append(await client.post("/v1/embeddings", json={}, headers={"Origin": origin}))
        relayed = await client.get("/version", headers={"Origin": origin})
    assert (preflight_answer.status_code, allowed_origin(preflight_answer.headers)) == (400, None)
    assert [answer.status_code for answer in refused] == [403] * 3
    assert refused[0].json()["error"]["code"] == "policy_violation"
    assert (relayed.status_code, allowed_origin(relayed.headers)) == (200, None)


async def test_public_url_origin_is_allowed_if_no_key_is_required(tmp_path: Path) -> None:
    async with served(tmp_path, None, public_url=f"{FOREIGN_ORIGIN.upper()}:443/models") as client:
        answer = await post_chat(client, {"Origin": FOREIGN_ORIGIN})
    assert answer.status_code == 200


async def test_request_without_an_origin_gets_no_cors_headers(tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        answers = [await post_chat(client), await client.get("/version")]
    names = [name for answer in answers for name in answer.headers]
    assert [name for name in names if name.startswith(("access-control", "vary"))] == []


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://192.168.1.5:8000", "192.168.1.5:8000"),
        ("http://[fd00::5]", "[fd00::5]:80"),
        ("chrome-extension://abcdef", "localhost:8000"),
        ("app://obsidian.md", "localhost:8000"),
    ],
)
async def test_origins_of_the_server_and_of_browser_extensions_and_apps_are_allowed_without_a_key(
    origin: str, host: str, tmp_path: Path
) -> None:
    async with served(tmp_path, None) as client:
        answer = await post_chat(client, {"Origin": origin, "Host": host})
    assert answer.status_code == 200
