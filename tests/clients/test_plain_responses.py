"""Stored responses of `:plain` models, reachable only with the key that created them."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.keys import Key, Keyring
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

KEYRING = Keyring([("sk-mine", Key("mine")), ("sk-yours", Key("yours"))])
MINE, YOURS = ({"authorization": f"Bearer sk-{whose}"} for whose in ("mine", "yours"))
PLAIN = {"model": "fake-model:plain", "input": "Hello."}


class ResponseBackend:
    """A backend that stores responses, as OpenAI does."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.seen: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path_qs}")
        if request.path == "/v1/responses":
            asked = await request.json()
            made = {"id": f"resp_{len(self.kept)}", "object": "response", "output": []}
            self.kept[made["id"]] = made
            if not asked.get("stream"):
                return web.json_response(made)
            event = {"type": "response.created", "response": made}
            text = f"event: response.created\ndata: {json.dumps(event)}\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        found = self.kept.get(request.path.split("/")[3])
        if found is None:
            return web.json_response({"error": {"message": "gone"}}, status=404)
        if request.method == "DELETE":
            del self.kept[found["id"]]
        return web.json_response(found)


@pytest.mark.parametrize("stream", [False, True])
async def test_relayed_response_can_be_read_and_deleted_only_with_the_key_that_made_it(
    stream: bool, tmp_path: Path
) -> None:
    storing_backend = ResponseBackend()
    async with (
        scripted_backend([], elsewhere=storing_backend.answer) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=KEYRING) as url,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as http,
    ):
        asked = {**PLAIN, "stream": stream}
        made = await http.post("/responses", json=asked, headers=MINE)
        path = "/responses/resp_0"
        found = await http.get(f"{path}?include=x", headers=MINE)
        items = await http.get(f"{path}/input_items", headers=MINE)
        foreign = await http.get(path, headers=YOURS)
        unknown = await http.get("/responses/resp_7", headers=MINE)
        deleted = await http.delete(path, headers=MINE)
        again = await http.get(path, headers=MINE)
    assert '"resp_0"' in made.text
    assert [each.status_code for each in (found, items, deleted)] == [200] * 3
    assert found.json()["id"] == "resp_0"
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert again.json() == {"error": {"message": "gone"}}
    assert storing_backend.seen == [
        "POST /v1/responses",
        "GET /v1/responses/resp_0?include=x",
        "GET /v1/responses/resp_0/input_items",
        "DELETE /v1/responses/resp_0",
        "GET /v1/responses/resp_0",
    ]


async def test_unstored_plain_response_is_not_found(tmp_path: Path) -> None:
    storing_backend = ResponseBackend()
    async with (
        scripted_backend([], elsewhere=storing_backend.answer) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as http,
    ):
        await http.post("/responses", json={**PLAIN, "store": False})
        found = await http.get("/responses/resp_0")
    assert found.status_code == 404
    assert storing_backend.seen == ["POST /v1/responses"]


async def test_plain_response_can_be_retrieved_after_a_restart(tmp_path: Path) -> None:
    async with scripted_backend([], elsewhere=ResponseBackend().answer) as backend:
        for first in (True, False):
            async with (
                running_proxy(backend, "memory", tmp_path) as url,
                httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as http,
            ):
                if first:
                    await http.post("/responses", json=PLAIN)
                found = await http.get("/responses/resp_0")
    assert found.json()["id"] == "resp_0"


async def test_response_with_a_litellm_id_can_be_retrieved_and_continued(tmp_path: Path) -> None:
    """LiteLLM's proxy encodes provider, model id and response id in base64 after `resp_`."""
    plain_id = (
        f"litellm:custom_llm_provider:openai;model_id:{'a' * 64};response_id:resp_{'b' * 48}?>"
    )
    own_id = f"resp_{base64.b64encode(plain_id.encode()).decode()}"
    seen: list[Any] = []

    async def respond(request: web.Request) -> web.Response:
        seen.append(await request.json() if request.can_read_body else request.path)
        return web.json_response({"id": own_id, "object": "response", "output": []})

    async with (
        scripted_backend([], elsewhere=respond) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as http,
    ):
        await http.post("/responses", json=PLAIN)
        following = {**PLAIN, "previous_response_id": own_id}
        second = await http.post("/responses", json=following)
        found = await http.get(f"/responses/{own_id}")
    assert own_id.endswith("=")
    assert (second.status_code, found.status_code, len(seen)) == (200, 200, 3)
