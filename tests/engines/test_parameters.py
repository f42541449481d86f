"""Answer formats requested by the client, with sandbox tools offered, at a real model server."""

import json

import pytest

from tests.engines.conftest import Served
from tests.engines.measured_requests import ask, post, request
from tests.engines.prompts import CITY
from tests.engines.servers import ENGINE

pytestmark = pytest.mark.engine
OVERRUN = 8
"""Tokens that the server generates before it notices that a call was ended at a limit."""
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


async def test_answer_restricted_to_yes_or_no_is_one_of_them(served: Served) -> None:
    body = request("Is the sun a star?", max_tokens=100, **ENGINE.one_of(["yes", "no"]))
    answer = await ask(served.url, served.server, body)
    assert (answer.status, answer.text in {"yes", "no"}) == (200, True), answer.body


async def test_response_format_schema_is_enforced(served: Served) -> None:
    body = request("What is the capital of France?", max_tokens=100, response_format=FORM)
    answer = await ask(served.url, served.server, body)
    assert answer.status == 200, answer.body
    assert list(json.loads(answer.text)) == ["city"]


async def test_three_choices_have_content_and_their_usage_is_near_the_servers_count(
    served: Served,
) -> None:
    body = request("Name a colour.", n=3, max_tokens=30, temperature=1.0)
    before = await served.server.token_counts()
    response = await post(served.url, body)
    counted = await served.server.token_counts() - before
    got = response.json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] for choice in got["choices"])
    assert 0 <= counted.completion - got["usage"]["completion_tokens"] <= 3 * OVERRUN


async def test_stream_has_content_and_usage(served: Served) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = request("What is 17 + 25?", max_tokens=60, **options)
    before = await served.server.token_counts()
    response = await post(served.url, body)
    counted = await served.server.token_counts() - before
    *chunks, end = [
        line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data")
    ]
    read = [json.loads(chunk) for chunk in chunks]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in read for choice in chunk["choices"]
    )
    assert (end, bool(text)) == ("[DONE]", True)
    (usage,) = [chunk["usage"] for chunk in read if chunk.get("usage")]
    assert 0 <= counted.completion - usage["completion_tokens"] <= OVERRUN
