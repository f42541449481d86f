"""OpenAI's own description of its API, held against ours."""

import re
from pathlib import Path
from typing import Any

import anyio
import httpx
import jsonschema_rs

from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.openapi.description import BASE_PATH, Tree, amended, answer_schema, described
from tests.openapi.drive import drive, drive_streams
from tests.openapi.strict_backend import strict

pytestmark = described
EXAMPLES, STREAMS = 10, 40
FEWEST_CASES = 1000
GOOD_SHARE = 0.6
"""Of what may be asked for; the rest names files, tools or schemas that there are not."""
LIMIT_S = 600
WALKED = {
    "GET /containers/{container_id}/files/{file_id}/content",
    "GET /responses/{response_id}",
    "DELETE /responses/{response_id}",
    "POST /responses/{response_id}/cancel",
    "GET /responses/{response_id}/input_items",
}
"""Of which schemathesis knows no ids; the walks do."""


async def test_whatever_may_be_asked_is_answered_as_openai_says(tmp_path: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive(
            tmp_path, "--generation-deterministic", "--max-examples", str(EXAMPLES)
        )
    assert outcome.passed, outcome.said
    assert outcome.cases > FEWEST_CASES
    shares = {operation: outcome.accepted(operation) for operation in outcome.report["valid_rates"]}
    assert {each for each, share in shares.items() if not share} <= WALKED
    assert shares["POST /responses"] > 0.25
    assert shares["POST /chat/completions"] > GOOD_SHARE


async def test_whatever_may_be_asked_is_streamed_as_openai_says(tmp_path: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive_streams(
            tmp_path, "--generation-deterministic", "--max-examples", str(STREAMS)
        )
    assert outcome.passed, outcome.said
    assert outcome.accepted("POST /chat/completions") > GOOD_SHARE


class Walk:
    """One client, each answer to whom is held against the description."""

    def __init__(self, client: httpx.AsyncClient, description: Tree) -> None:
        self._client = client
        self._description = description

    async def ask(self, method: str, path: str, *ids: str, **body: Any) -> Any:
        given = iter(ids)
        url = re.sub(r"\{\w+\}", lambda _: next(given), BASE_PATH + path)
        answer = await self._client.request(method, url, **body)
        assert answer.status_code == 200, answer.text
        if "json" not in answer.headers["content-type"]:
            return answer.content
        schema = answer_schema(self._description, method.lower(), path)
        jsonschema_rs.validate(schema, answer.json())
        return answer.json()


async def test_what_is_made_is_found_told_of_and_ended_as_openai_says(tmp_path: Path) -> None:
    description = amended()
    containers, one = "/containers", "/containers/{container_id}"
    files, file = f"{one}/files", f"{one}/files/{{file_id}}"
    async with (
        scripted_backend(strict(description)) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        walk = Walk(client, description)
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", b"one")}}
        sent = (await walk.ask("POST", "/files", **form))["id"]
        body = {"name": "x", "file_ids": [sent]}
        made = (await walk.ask("POST", containers, json=body))["id"]
        put = (await walk.ask("POST", files, made, files={"file": ("b.txt", b"two")}))["id"]
        copied = (await walk.ask("POST", files, made, json={"file_id": sent}))["id"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        chat["sandbox"] = {"container_id": made}
        await walk.ask("POST", "/chat/completions", json=chat)
        listed = await walk.ask("GET", files, made, params={"order": "asc"})
        paths = [each["path"].rpartition("/")[2] for each in listed["data"]]
        assert paths == ["a.txt", "b.txt", "a-2.txt", "answer.csv"]
        contents = [await walk.ask("GET", f"{file}/content", made, each) for each in (put, copied)]
        assert contents == [b"two", b"one"]
        for name, ids in ((file, (made, put)), (one, (made,)), ("/files/{file_id}", (sent,))):
            assert (await walk.ask("GET", name, *ids))["id"] == ids[-1]
            assert (await walk.ask("DELETE", name, *ids))["deleted"]
        for name in (containers, "/files"):
            assert (await walk.ask("GET", name))["data"] == []


async def test_a_response_is_kept_told_of_and_ended_as_openai_says(tmp_path: Path) -> None:
    description = amended()
    one = "/responses/{response_id}"
    async with (
        scripted_backend(strict(description)) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        walk = Walk(client, description)
        body = {"model": "m", "input": "?"}
        first = await walk.ask("POST", "/responses", json=body)
        going_on = {**body, "previous_response_id": first["id"]}
        second = await walk.ask("POST", "/responses", json=going_on)
        later = await walk.ask("POST", "/responses", json={**body, "background": True})
        await walk.ask("POST", f"{one}/cancel", later["id"])
        for made in (first, second):
            assert (await walk.ask("GET", one, made["id"]))["output"] == made["output"]
        items = await walk.ask("GET", f"{one}/input_items", second["id"], params={"limit": 1})
        assert items["has_more"]
        for made in (first, second, later):
            await walk.ask("DELETE", one, made["id"])
            assert (
                await client.get(BASE_PATH + one.format(response_id=made["id"]))
            ).is_client_error
