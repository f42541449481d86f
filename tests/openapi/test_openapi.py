"""The server's answers, validated against OpenAI's own description."""

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
"""Minimum share of accepted requests; the others reference what does not exist."""
LIMIT_S = 600
WALKED = {
    "GET /containers/{container_id}/files/{file_id}/content",
    "GET /responses/{response_id}",
    "DELETE /responses/{response_id}",
    "POST /responses/{response_id}/cancel",
    "GET /responses/{response_id}/input_items",
}
"""Operations whose ids schemathesis cannot know; the hand-written tests cover them."""


async def test_answers_to_generated_requests_match_openais_api_description(tmp_path: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive(
            tmp_path, "--generation-deterministic", "--max-examples", str(EXAMPLES)
        )
    assert outcome.passed, outcome.output
    assert outcome.cases > FEWEST_CASES
    shares = {operation: outcome.accepted(operation) for operation in outcome.report["valid_rates"]}
    assert {each for each, share in shares.items() if not share} <= WALKED
    assert shares["POST /responses"] > 0.25
    assert shares["POST /chat/completions"] > GOOD_SHARE


async def test_streams_match_openai_description(tmp_path: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive_streams(
            tmp_path, "--generation-deterministic", "--max-examples", str(STREAMS)
        )
    assert outcome.passed, outcome.output
    assert outcome.accepted("POST /chat/completions") > GOOD_SHARE


class ValidatingClient:
    """A client that validates each answer against the description."""

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


async def test_files_and_containers_match_openai_description(tmp_path: Path) -> None:
    description = amended()
    containers, one = "/containers", "/containers/{container_id}"
    files, file = f"{one}/files", f"{one}/files/{{file_id}}"
    async with (
        scripted_backend(strict(description)) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        validating = ValidatingClient(client, description)
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", b"one")}}
        sent = (await validating.ask("POST", "/files", **form))["id"]
        body = {"name": "x", "file_ids": [sent]}
        made = (await validating.ask("POST", containers, json=body))["id"]
        put = (await validating.ask("POST", files, made, files={"file": ("b.txt", b"two")}))["id"]
        copied = (await validating.ask("POST", files, made, json={"file_id": sent}))["id"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        chat["sandbox"] = {"container_id": made}
        await validating.ask("POST", "/chat/completions", json=chat)
        listed = await validating.ask("GET", files, made, params={"order": "asc"})
        paths = [each["path"].rpartition("/")[2] for each in listed["data"]]
        assert paths == ["a.txt", "b.txt", "a-2.txt", "answer.csv"]
        contents = [
            await validating.ask("GET", f"{file}/content", made, each) for each in (put, copied)
        ]
        assert contents == [b"two", b"one"]
        for name, ids in ((file, (made, put)), (one, (made,)), ("/files/{file_id}", (sent,))):
            assert (await validating.ask("GET", name, *ids))["id"] == ids[-1]
            assert (await validating.ask("DELETE", name, *ids))["deleted"]
        for name in (containers, "/files"):
            assert (await validating.ask("GET", name))["data"] == []


async def test_stored_responses_match_openai_description(tmp_path: Path) -> None:
    description = amended()
    one = "/responses/{response_id}"
    async with (
        scripted_backend(strict(description)) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        validating = ValidatingClient(client, description)
        body = {"model": "m", "input": "?"}
        first = await validating.ask("POST", "/responses", json=body)
        going_on = {**body, "previous_response_id": first["id"]}
        second = await validating.ask("POST", "/responses", json=going_on)
        later = await validating.ask("POST", "/responses", json={**body, "background": True})
        await validating.ask("POST", f"{one}/cancel", later["id"])
        for made in (first, second):
            assert (await validating.ask("GET", one, made["id"]))["output"] == made["output"]
        items = await validating.ask("GET", f"{one}/input_items", second["id"], params={"limit": 1})
        assert items["has_more"]
        for made in (first, second, later):
            await validating.ask("DELETE", one, made["id"])
            assert (
                await client.get(BASE_PATH + one.format(response_id=made["id"]))
            ).is_client_error
