"""Clients inside web pages: their browsers ask whether they may, and hide the answer if not."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.keys import Keyring
from proxy.models.scripted import text_reply
from tests.clients.chat import ask
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy, single_key

CHAT = "/v1/chat/completions"
FAR = "https://app.example"
HEADERS = "authorization, content-type, x-stainless-lang"
KEY = {"Authorization": "Bearer sk-ours"}


async def open_to_all(_: web.Request) -> web.Response:
    return web.json_response({}, headers={"Access-Control-Allow-Origin": "*"})


@asynccontextmanager
async def served(
    state_dir: Path, key: str | None, **parts: Any
) -> AsyncIterator[httpx.AsyncClient]:
    keyring = single_key(key) if key else Keyring()
    async with (
        scripted_backend(lambda body: text_reply("Well."), elsewhere=open_to_all) as backend,
        running_proxy(backend, "memory", state_dir, keyring=keyring, **parts) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def asked_first(client: httpx.AsyncClient, page: str) -> httpx.Response:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": HEADERS}
    return await client.options(CHAT, headers={"Origin": page, **wanted})


def may_read(headers: Mapping[str, str]) -> str | None:
    return headers.get("access-control-allow-origin")


async def test_a_page_from_anywhere_may_ask_where_a_key_is_needed(tmp_path: Path) -> None:
    page = {"Origin": FAR}
    async with served(tmp_path, "sk-ours") as client:
        before = await asked_first(client, FAR)
        answers = [
            await ask(client, {**page, **KEY}),
            await ask(client, {**page, **KEY}, stream=True),
            await ask(client, page),
            await client.get("/version", headers={**page, **KEY}),
        ]
    assert (before.status_code, may_read(before.headers)) == (200, "*")
    assert before.headers["access-control-allow-headers"] == HEADERS
    assert "DELETE" in before.headers["access-control-allow-methods"]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 200]
    assert [may_read(answer.headers) for answer in answers] == ["*"] * 4
    assert answers[0].headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize("page", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8"])
async def test_a_page_of_this_machine_may_ask_without_a_key(page: str, tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        before = await asked_first(client, page)
        answer = await ask(client, {"Origin": page})
    assert (before.status_code, may_read(before.headers)) == (200, page)
    assert (answer.status_code, may_read(answer.headers)) == (200, page)


@pytest.mark.parametrize(
    "page", [FAR, "http://localhost.app.example", "null", "http://[::1", "http://a:b"]
)
async def test_no_other_page_may_ask_without_a_key(page: str, tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        before = await asked_first(client, page)
        # Neither a simple request, which is sent without asking, nor one to a name that the page's
        # own site has given this machine's address.
        simple = {"Origin": page, "Content-Type": "text/plain"}
        rebound = {"Origin": page, "Host": page.removeprefix("https://")}
        refused = [await ask(client, headers) for headers in (simple, rebound)]
        refused.append(await client.post("/v1/embeddings", json={}, headers={"Origin": page}))
        passed_on = await client.get("/version", headers={"Origin": page})
    assert (before.status_code, may_read(before.headers)) == (400, None)
    assert [answer.status_code for answer in refused] == [403] * 3
    assert refused[0].json()["error"]["code"] == "policy_violation"
    assert (passed_on.status_code, may_read(passed_on.headers)) == (200, None)


async def test_a_page_of_the_public_url_may_ask_without_a_key(tmp_path: Path) -> None:
    async with served(tmp_path, None, public_url=f"{FAR.upper()}:443/models") as client:
        answer = await ask(client, {"Origin": FAR})
    assert answer.status_code == 200


async def test_who_is_no_page_hears_nothing_of_pages(tmp_path: Path) -> None:
    async with served(tmp_path, None) as client:
        answers = [await ask(client), await client.get("/version")]
    names = [name for answer in answers for name in answer.headers]
    assert [name for name in names if name.startswith(("access-control", "vary"))] == []


@pytest.mark.parametrize(
    ("page", "host"),
    [
        ("http://192.168.1.5:8000", "192.168.1.5:8000"),
        ("http://[fd00::5]", "[fd00::5]:80"),
        ("chrome-extension://abcdef", "localhost:8000"),
        ("app://obsidian.md", "localhost:8000"),
    ],
)
async def test_the_servers_own_page_and_an_application_may_ask_without_a_key(
    page: str, host: str, tmp_path: Path
) -> None:
    async with served(tmp_path, None) as client:
        answer = await ask(client, {"Origin": page, "Host": host})
    assert answer.status_code == 200
