"""GET / and GET /v1/capabilities: the state of the server, also if the backend does not answer."""

import json
import shlex
from pathlib import Path

import httpx

from proxy.models.scripted import text_reply
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy, single_key


def unreachable_backend() -> ScriptedBackend:
    backend = ScriptedBackend("vllm", "fake-model")
    backend.base_url = "http://127.0.0.1:1/v1"
    return backend


async def test_front_page_names_the_backend_the_sandboxes_and_the_api(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        page = await client.get("/", headers={"accept": "text/html"})
        text = await client.get("/")
        head = await client.head("/")
    assert page.status_code == text.status_code == head.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert f'<a href="{url}/docs">' in page.text
    assert "model backend: answers; models: 1\n" in text.text
    assert "sandboxes: " in text.text
    assert f"base URL for OpenAI SDKs: {url}/v1\n" in text.text


async def test_front_page_commands_list_the_models_and_ask_a_model(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("A Friday.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        lines = dict(line.split(": ", 1) for line in (await client.get("/")).text.splitlines()[1:])
        curl, address = shlex.split(lines["list the models"])
        assert curl == "curl"
        listed = (await client.get(address)).json()["data"]
        command = lines["try, with a listed model for MODEL"].replace("MODEL", listed[0]["id"])
        curl, address, _, header, _, body = shlex.split(command)
        assert (curl, header) == ("curl", "Content-Type: application/json")
        answer = await client.post(address, json=json.loads(body))
    assert json.loads(body)["model"] == "fake-model"
    assert answer.json()["choices"][0]["message"]["content"] == "A Friday."


async def test_front_page_needs_no_key_and_shows_where_the_key_goes(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key("sk-right")) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        text = (await client.get("/")).text
    assert "Authorization: Bearer $API_KEY" in text
    assert "sk-right" not in text


async def test_front_page_checks_the_backend_once_for_many_visitors(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for _ in range(5):
            assert (await client.get("/")).status_code == 200
    assert len(backend.listings) == 1


async def test_front_page_is_served_while_the_backend_is_down(tmp_path: Path) -> None:
    async with (
        running_proxy(unreachable_backend(), "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        answer = await client.get("/")
    assert answer.status_code == 200
    expected = "model backend: does not list its models; `sandbox-proxy doctor` tells the reason\n"
    assert expected in answer.text


async def test_capabilities_are_served_while_the_backend_is_down(tmp_path: Path) -> None:
    async with (
        running_proxy(unreachable_backend(), "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        answer = await client.get("/v1/capabilities")
    assert answer.status_code == 200
    assert answer.json()["models"] == []
    assert answer.json()["backend_error"]
    assert answer.json()["tools"] == ["str_replace_editor", "execute_bash", "submit"]
