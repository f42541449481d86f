"""/openapi.json and the /docs page that shows it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from policies.profile import Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from proxy.schemas.chat_parameters import OPENAI
from proxy.schemas.responses_parameters import FIELDS
from tests.fakes.backend import Item, scripted_backend
from tests.fakes.server import running_proxy, single_key

KEY = "sk-right"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
ABOUT_ITSELF = {"GET /", "GET /openapi.json", "GET /docs", "GET /docs/{asset}"}
REFUSED_ALWAYS = {"context_management", "prompt"}
"""Fields of the Responses API that are always refused."""
CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
Tree = dict[str, Any]
Script = Sequence[Item] | Callable[[Tree], Item]


@asynccontextmanager
async def description_client(
    state_dir: Path, script: Script = lambda _: text_reply("Hello."), **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a model that answers as scripted, else always `Hello.`; yield a client without a
    key."""
    changes = {"keyring": single_key(KEY), **changes}
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", state_dir, **changes) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client


async def api_description(client: httpx.AsyncClient) -> Tree:
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


class CountingExecutor(ThreadPoolExecutor):
    """Runs functions in threads, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        return super().submit(fn, *args, **kwargs)


async def test_concurrent_first_requests_share_the_generation_of_the_description(
    tmp_path: Path,
) -> None:
    """2,000 requests at once generated the description 2,000 times, in 18 s."""
    async with description_client(tmp_path) as client:
        await client.get("/health")
        executor = CountingExecutor()
        asyncio.get_running_loop().set_default_executor(executor)
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(50)))
    assert len({answer.content for answer in answers}) == 1
    assert executor.count < len(answers) // 2


async def test_description_contains_every_route(tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
        tree = await api_description(client)
        able = (await client.get("/v1/capabilities", headers=WITH_KEY)).json()
    routes = {each.replace(":path}", "}") for each in able["endpoints"]} - ABOUT_ITSELF
    described = {f"{method.upper()} {path}" for path, of in tree["paths"].items() for method in of}
    assert described == routes


async def test_description_has_unique_operations_and_no_dangling_references(tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
        tree = await api_description(client)
    schemas = tree["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in references(tree)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    operations = [(path, each) for path, of in tree["paths"].items() for each in of.values()]
    names = {operation["operationId"] for _, operation in operations}
    assert len(names) == len(operations)
    for path, operation in operations:
        assert {"200", "500"} <= set(operation["responses"])
        assert ("401" in operation["responses"]) == (not path.startswith("/health"))


async def test_description_needs_no_key_and_ignores_the_configuration(tmp_path: Path) -> None:
    profiles = Profiles.only(Profile(name="night-shift", about="For those who are awake."))
    async with (
        description_client(tmp_path / "one") as one,
        description_client(
            tmp_path / "other", profiles=profiles, keyring=single_key("sk-another")
        ) as other,
    ):
        first, second = await one.get("/openapi.json"), await other.get("/openapi.json")
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.text == second.text


class _Links(HTMLParser):
    """Collects the links that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href") and value]


async def test_docs_page_loads_only_its_own_assets(tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
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


async def test_docs_route_serves_only_the_assets_of_the_docs_page(tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
        for name in ("core.py", "..%2f__init__.py", "redoc.standalone.js"):
            assert (await client.get(f"/docs/{name}", headers=WITH_KEY)).status_code == 404


async def test_validated_request_fields_are_described(tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
        schemas = (await api_description(client))["components"]["schemas"]
    assert set(OPENAI) <= set(schemas["ChatCompletionRequest"]["properties"])
    assert set(FIELDS) - REFUSED_ALWAYS <= set(schemas["ResponseRequest"]["properties"])


class ValidatingClient:
    """A client that validates each answer against the description. The answers may have only the
    fields that are described."""

    def __init__(self, client: httpx.AsyncClient, tree: Tree) -> None:
        self._client = client
        self._paths = tree["paths"]
        self._schemas = {
            name: {"additionalProperties": False, **schema} if "properties" in schema else schema
            for name, schema in tree["components"]["schemas"].items()
        }

    async def ask(self, method: str, path: str, *ids: str, status: int = 200, **more: Any) -> Any:
        """Send a request with the key; `ids` fill the path's parameters."""
        given = iter(ids)
        url = re.sub(r"\{\w+\}", lambda _: next(given), path)
        answer = await self._client.request(method, url, headers=WITH_KEY, **more)
        assert answer.status_code == status, answer.text
        content = self._paths[path][method.lower()]["responses"][str(status)]["content"]
        kind = answer.headers["content-type"].partition(";")[0]
        if kind != "application/json":
            return answer.content
        schema = {**content[kind]["schema"], "components": {"schemas": self._schemas}}
        jsonschema_rs.validate(schema, answer.json())
        return answer.json()


async def test_answers_of_file_and_container_routes_match_the_description(tmp_path: Path) -> None:
    files, file = "/v1/files", "/v1/files/{file_id}"
    containers, one = "/v1/containers", "/v1/containers/{container_id}"
    inside, each = f"{one}/files", f"{one}/files/{{file_id}}"
    policy = {"type": "allowlist", "allowed_domains": ["example.org"]}
    async with description_client(tmp_path) as client:
        validating = ValidatingClient(client, await api_description(client))
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", b"one")}}
        sent = (await validating.ask("POST", files, **form))["id"]
        await validating.ask("POST", files, data={"purpose": "user_data"}, status=400)
        assert (await validating.ask("GET", files))["first_id"] == sent
        body = {"name": "x", "file_ids": [sent], "network_policy": policy}
        made = await validating.ask("POST", containers, json=body)
        assert made["network_policy"] == policy
        assert "memory_limit" not in made
        await validating.ask("POST", containers, json={}, status=400)
        put = (await validating.ask("POST", inside, made["id"], json={"file_id": sent}))["id"]
        assert (await validating.ask("GET", inside, made["id"]))["data"][0]["id"] == put
        assert await validating.ask("GET", f"{each}/content", made["id"], put) == b"one"
        assert (await validating.ask("GET", f"{inside}/content", made["id"]))[:2] == b"PK"
        for path, ids in ((each, (made["id"], put)), (one, (made["id"],)), (file, (sent,))):
            assert (await validating.ask("GET", path, *ids))["id"] == ids[-1]
            assert (await validating.ask("DELETE", path, *ids))["deleted"]
            await validating.ask("GET", path, *ids, status=404)


async def test_answers_of_conversation_and_response_routes_match_the_description(
    tmp_path: Path,
) -> None:
    conversations, one = "/v1/conversations", "/v1/conversations/{conversation_id}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    response = "/v1/responses/{response_id}"
    message = {"type": "message", "role": "user", "content": "Hello."}
    async with description_client(tmp_path) as client:
        validating = ValidatingClient(client, await api_description(client))
        made = (await validating.ask("POST", conversations, json={"items": [message]}))["id"]
        await validating.ask("POST", one, made, json={"metadata": {"a": "b"}})
        added = (await validating.ask("POST", items, made, json={"items": [message]}))["first_id"]
        assert len((await validating.ask("GET", items, made))["data"]) == 2
        await validating.ask("GET", items, made, params={"limit": "many"}, status=400)
        await validating.ask("GET", item, made, added)
        assert (await validating.ask("DELETE", item, made, added))["metadata"] == {"a": "b"}
        body = {"model": "fake-model", "input": "Hello."}
        answered = (await validating.ask("POST", "/v1/responses", json=body))["id"]
        await validating.ask("GET", response, answered)
        await validating.ask("GET", f"{response}/input_items", answered)
        await validating.ask("POST", f"{response}/cancel", answered, status=400)
        await validating.ask("DELETE", response, answered)
        await validating.ask("DELETE", one, made)
        await validating.ask("GET", one, made, status=404)


async def test_answers_of_completion_and_run_and_system_routes_match_the_description(
    tmp_path: Path,
) -> None:
    async with description_client(tmp_path) as client:
        validating = ValidatingClient(client, await api_description(client))
        chat = await validating.ask("POST", "/v1/chat/completions", json=CHAT)
        run = "/v1/runs/{run_id}"
        assert (await validating.ask("GET", run, chat["sandbox"]["run_id"]))[
            "status"
        ] == "completed"
        assert (await validating.ask("DELETE", run, chat["sandbox"]["run_id"]))["error"] is None
        await validating.ask("GET", run, "none", status=404)
        await validating.ask("POST", "/v1/messages", json={**CHAT, "max_tokens": 100})
        await validating.ask("POST", "/v1/messages", json=CHAT, status=400)
        await validating.ask("GET", "/v1/models")
        await validating.ask("GET", "/v1/models/{model}", "fake-model:plain")
        await validating.ask("GET", "/v1/capabilities")
        await validating.ask("GET", "/health")
        assert b"llm_sandbox_runs_total" in await validating.ask("GET", "/metrics")


async def test_answers_of_trajectory_routes_match_the_description(tmp_path: Path) -> None:
    trajectories, one = "/v1/trajectories", "/v1/trajectories/{run_id}"
    script = [tool_reply(call("execute_bash", command="echo 42 > output/a")), text_reply("Hello.")]
    async with description_client(tmp_path, script) as client:
        validating = ValidatingClient(client, await api_description(client))
        body = {**CHAT, "sandbox": {"capture": "messages"}}
        answered = await validating.ask("POST", "/v1/chat/completions", json=body)
        run_id = answered["sandbox"]["run_id"]
        await validating.ask("POST", f"{one}/reward", run_id, json={"value": 1})
        for path in (one, "/v1/runs/{run_id}/trajectory"):
            found = await validating.ask("GET", path, run_id)
            assert (found["result"]["answer"], len(found["tool_calls"])) == ("Hello.", 1)
            for format in ("openai", "reference"):
                await validating.ask("GET", path, run_id, params={"format": format})
        assert [each["id"] for each in (await validating.ask("GET", trajectories))["data"]] == [
            run_id
        ]
        await validating.ask("DELETE", one, run_id)
        await validating.ask("GET", one, run_id, status=404)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/models", "/v1/capabilities", "/metrics"])
async def test_401_without_a_key_matches_the_openapi_description(path: str, tmp_path: Path) -> None:
    async with description_client(tmp_path) as client:
        tree = await api_description(client)
        answer = await client.get(path)
    assert answer.status_code == 401
    assert "401" in tree["paths"][path]["get"]["responses"]
    schema = {"$ref": "#/components/schemas/ErrorResponse", "components": tree["components"]}
    jsonschema_rs.validate(schema, json.loads(answer.content))
