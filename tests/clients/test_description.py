"""The description of the API, and the page that shows it."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from policies.profile import Profile
from proxy.models.scripted import text_reply
from proxy.profiles import Profiles
from proxy.schemas.chat_parameters import OPENAI
from proxy.schemas.responses_parameters import FIELDS
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy, single_key

KEY = "sk-right"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
ABOUT_ITSELF = {"GET /openapi.json", "GET /docs", "GET /docs/{asset}"}
REFUSED_ALWAYS = {"context_management", "prompt"}
"""Fields of the Responses API that no request may have."""
CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
Tree = dict[str, Any]


@asynccontextmanager
async def served(state_dir: Path, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key of a server whose model says only `Hello.`"""
    changes = {"keyring": single_key(KEY), **changes}
    async with (
        scripted_backend(lambda body: text_reply("Hello.")) as backend,
        running_proxy(backend, "memory", state_dir, **changes) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client


async def described(client: httpx.AsyncClient) -> Tree:
    answer = await client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    tree: Tree = answer.json()
    return tree


def references(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        yield from [tree["$ref"]] if isinstance(tree.get("$ref"), str) else []
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from references(each)


async def test_every_route_is_described(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        tree = await described(client)
        able = (await client.get("/v1/capabilities", headers=WITH_KEY)).json()
    routes = {each.replace(":path}", "}") for each in able["endpoints"]} - ABOUT_ITSELF
    told = {f"{method.upper()} {path}" for path, of in tree["paths"].items() for method in of}
    assert told == routes


async def test_the_description_is_whole(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        tree = await described(client)
    schemas = tree["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in references(tree)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    operations = [(path, each) for path, of in tree["paths"].items() for each in of.values()]
    names = {operation["operationId"] for _, operation in operations}
    assert len(names) == len(operations)
    for path, operation in operations:
        assert {"200", "500"} <= set(operation["responses"])
        assert ("401" in operation["responses"]) == (path != "/health")


async def test_it_is_the_same_for_every_operator_and_needs_no_key(tmp_path: Path) -> None:
    profiles = Profiles.only(Profile(name="night-shift", about="For those who are awake."))
    async with (
        served(tmp_path / "one") as one,
        served(tmp_path / "other", profiles=profiles, keyring=single_key("sk-another")) as other,
    ):
        assert (await one.get("/openapi.json")).text == (await other.get("/openapi.json")).text


class _Links(HTMLParser):
    """What a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href") and value]


async def test_the_page_loads_nothing_from_another_host(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        page = await client.get("/docs")
        parser = _Links()
        parser.feed(page.text)
        (described_at,) = re.findall(r"url: '([^']+)'", page.text)
        own = [link for link in parser.links if not link.startswith("data:")]
        kinds = {
            link: (answer.status_code, answer.headers["content-type"].partition(";")[0])
            for link in [*own, described_at]
            for answer in [await client.get(link)]
        }
    assert kinds == {
        "/docs/swagger-ui.css": (200, "text/css"),
        "/docs/swagger-ui-bundle.js": (200, "text/javascript"),
        "/openapi.json": (200, "application/json"),
    }
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text


async def test_the_page_has_no_other_files(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        for name in ("core.py", "..%2f__init__.py", "redoc.standalone.js"):
            assert (await client.get(f"/docs/{name}", headers=WITH_KEY)).status_code == 404


async def test_the_fields_that_are_checked_are_described(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        schemas = (await described(client))["components"]["schemas"]
    assert set(OPENAI) <= set(schemas["ChatCompletionRequest"]["properties"])
    assert set(FIELDS) - REFUSED_ALWAYS <= set(schemas["ResponseRequest"]["properties"])


class Walk:
    """One client, each answer to whom is held against the description."""

    def __init__(self, client: httpx.AsyncClient, tree: Tree) -> None:
        self._client = client
        self._tree = tree

    async def ask(self, method: str, path: str, *ids: str, status: int = 200, **more: Any) -> Any:
        """Ask with the key; `ids` fill the path."""
        given = iter(ids)
        url = re.sub(r"\{\w+\}", lambda _: next(given), path)
        answer = await self._client.request(method, url, headers=WITH_KEY, **more)
        assert answer.status_code == status, answer.text
        content = self._tree["paths"][path][method.lower()]["responses"][str(status)]["content"]
        kind = answer.headers["content-type"].partition(";")[0]
        if kind != "application/json":
            return answer.content
        schema = {**content[kind]["schema"], "components": self._tree["components"]}
        jsonschema_rs.validate(schema, answer.json())
        return answer.json()


async def test_files_and_containers_answer_as_described(tmp_path: Path) -> None:
    files, file = "/v1/files", "/v1/files/{file_id}"
    containers, one = "/v1/containers", "/v1/containers/{container_id}"
    inside, each = f"{one}/files", f"{one}/files/{{file_id}}"
    policy = {"type": "allowlist", "allowed_domains": ["example.org"]}
    async with served(tmp_path) as client:
        walk = Walk(client, await described(client))
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", b"one")}}
        sent = (await walk.ask("POST", files, **form))["id"]
        await walk.ask("POST", files, data={"purpose": "user_data"}, status=400)
        assert (await walk.ask("GET", files))["first_id"] == sent
        body = {"name": "x", "file_ids": [sent], "network_policy": policy}
        made = await walk.ask("POST", containers, json=body)
        assert made["network_policy"] == policy
        assert "memory_limit" not in made
        await walk.ask("POST", containers, json={}, status=400)
        put = (await walk.ask("POST", inside, made["id"], json={"file_id": sent}))["id"]
        assert (await walk.ask("GET", inside, made["id"]))["data"][0]["id"] == put
        assert await walk.ask("GET", f"{each}/content", made["id"], put) == b"one"
        assert (await walk.ask("GET", f"{inside}/content", made["id"]))[:2] == b"PK"
        for path, ids in ((each, (made["id"], put)), (one, (made["id"],)), (file, (sent,))):
            assert (await walk.ask("GET", path, *ids))["id"] == ids[-1]
            assert (await walk.ask("DELETE", path, *ids))["deleted"]
            await walk.ask("GET", path, *ids, status=404)


async def test_conversations_and_responses_answer_as_described(tmp_path: Path) -> None:
    conversations, one = "/v1/conversations", "/v1/conversations/{conversation_id}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    response = "/v1/responses/{response_id}"
    message = {"type": "message", "role": "user", "content": "Hello."}
    async with served(tmp_path) as client:
        walk = Walk(client, await described(client))
        made = (await walk.ask("POST", conversations, json={"items": [message]}))["id"]
        await walk.ask("POST", one, made, json={"metadata": {"a": "b"}})
        added = (await walk.ask("POST", items, made, json={"items": [message]}))["first_id"]
        assert len((await walk.ask("GET", items, made))["data"]) == 2
        await walk.ask("GET", items, made, params={"limit": "many"}, status=400)
        await walk.ask("GET", item, made, added)
        assert (await walk.ask("DELETE", item, made, added))["metadata"] == {"a": "b"}
        body = {"model": "fake-model", "input": "Hello."}
        answered = (await walk.ask("POST", "/v1/responses", json=body))["id"]
        await walk.ask("GET", response, answered)
        await walk.ask("GET", f"{response}/input_items", answered)
        await walk.ask("POST", f"{response}/cancel", answered, status=400)
        await walk.ask("DELETE", response, answered)
        await walk.ask("DELETE", one, made)
        await walk.ask("GET", one, made, status=404)


async def test_answers_runs_and_the_server_itself_answer_as_described(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        walk = Walk(client, await described(client))
        chat = await walk.ask("POST", "/v1/chat/completions", json=CHAT)
        run = "/v1/runs/{run_id}"
        assert (await walk.ask("GET", run, chat["sandbox"]["run_id"]))["status"] == "completed"
        assert (await walk.ask("DELETE", run, chat["sandbox"]["run_id"]))["error"] is None
        await walk.ask("GET", run, "none", status=404)
        await walk.ask("POST", "/v1/messages", json={**CHAT, "max_tokens": 100})
        await walk.ask("POST", "/v1/messages", json=CHAT, status=400)
        await walk.ask("GET", "/v1/models")
        await walk.ask("GET", "/v1/models/{model}", "fake-model:plain")
        await walk.ask("GET", "/v1/capabilities")
        await walk.ask("GET", "/health")
        assert b"llm_sandbox_runs_total" in await walk.ask("GET", "/metrics")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/models", "/v1/capabilities", "/metrics"])
async def test_a_request_without_the_key_is_refused_as_described(path: str, tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        tree = await described(client)
        answer = await client.get(path)
    assert answer.status_code == 401
    assert "401" in tree["paths"][path]["get"]["responses"]
    schema = {"$ref": "#/components/schemas/ErrorResponse", "components": tree["components"]}
    jsonschema_rs.validate(schema, json.loads(answer.content))
