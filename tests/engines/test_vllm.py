"""Features of vLLM: its own request fields, enforced tool choice, and refusal of tools."""

import statistics
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from tests.engines.conftest import Served
from tests.engines.engine import MODEL, REQUEST_TIMEOUT_S, Body
from tests.engines.measured_requests import PATIENCE_S, ask, captured_replies, post, request
from tests.engines.servers import model_server, proxy, tools_always
from tests.engines.vllm import NO_PARSER

pytestmark = pytest.mark.engine
WINDOW = 2048
MEDIAN_DIFFERENCE, MAX_DIFFERENCE = 0.05, 0.5
"""Bounds of the difference of two log probabilities of one token: the weights are in bfloat16, and
the engine computes a prompt in another order than a reply."""
YES_OR_NO = ["yes", "no"]
GET_TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Tells the present time of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
THIS_TOOL = {"type": "function", "function": {"name": "get_time"}}
TIME = request("What time is it in Paris?", tools=[GET_TIME], max_tokens=100, temperature=0)
SUM = request("What is 2 + 2?", max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
async def refusing() -> AsyncIterator[Served]:
    """A server without a tool call parser, behind a proxy with default settings."""
    async with model_server(tools=NO_PARSER) as server, proxy(server.url) as proxied:
        yield Served(server, f"http://127.0.0.1:{proxied.port}")


async def request_path(url: str, path: str, body: Body | None = None) -> httpx.Response:
    """Return the answer of a path other than chat."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": YES_OR_NO}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"guided_choice": YES_OR_NO},
        {"guided_regex": "yes|no"},
    ],
    ids=["choice", "regex", "former-choice", "former-regex"],
)
async def test_answer_with_a_guided_choice_is_one_of_the_choices(
    fields: dict[str, Any], served: Served
) -> None:
    answer = await ask(served.url, served.server, {**SUM, **fields})
    assert (answer.status, answer.text in YES_OR_NO) == (200, True), answer.body


async def test_token_ids_match_the_answer(served: Served) -> None:
    answer = await ask(served.url, served.server, {**SUM, "return_token_ids": True})
    choice = answer.body["choices"][0]
    tokens = {"model": MODEL, "tokens": choice["token_ids"]}
    text = (await request_path(served.server.url, "/detokenize", tokens)).json()["prompt"]
    assert text.removesuffix("<|im_end|>").strip() == answer.text.strip()
    assert answer.body["prompt_token_ids"]


@pytest.fixture
async def capturing(served: Served) -> AsyncIterator[Served]:
    """The server behind a proxy whose profile allows `sandbox.capture: tokens`."""
    # The reference style goes on after a turn without a call, which a small model seldom makes.
    agent = {"capture_tokens": True, "style": "reference"}
    profiles = {"default": {"agent": agent, "limits": {"max_turns": 3, "final_question": False}}}
    async with proxy(served.server.url, profiles=profiles, **tools_always()) as ours:
        yield Served(served.server, f"http://127.0.0.1:{ours.port}")


async def test_captured_log_probabilities_are_near_those_that_the_engine_recomputes(
    capturing: Served,
) -> None:
    body = request("Count the files.", max_tokens=60, temperature=1, seed=7)
    answered = await post(capturing.url, {**body, "sandbox": {"capture": "tokens"}})
    path = f"/v1/runs/{answered.headers['x-sandbox-run']}/trajectory"
    found = (await request_path(capturing.url, path)).json()
    assert len(found["model_calls"]) == 3
    differences = []
    for reply in captured_replies(found):
        again = {"model": MODEL, "prompt": reply.ids, "prompt_logprobs": 0, "max_tokens": 1}
        answer = (await request_path(capturing.server.url, "/v1/completions", again)).json()
        recomputed = answer["choices"][0]["prompt_logprobs"]
        start = reply.prompt_tokens
        differences += [
            abs(recomputed[index][str(reply.ids[index])]["logprob"] - reply.logprobs[index - start])
            for index in range(start, len(reply.ids))
        ]
    assert statistics.median(differences) < MEDIAN_DIFFERENCE
    assert max(differences) < MAX_DIFFERENCE


async def test_log_probabilities_match_the_answer(served: Served) -> None:
    answer = await ask(served.url, served.server, {**SUM, "logprobs": True})
    tokens = answer.body["choices"][0]["logprobs"]["content"]
    text = "".join(each["token"] for each in tokens).removesuffix("<|im_end|>")
    assert text.strip() == answer.text.strip()


async def test_prompt_log_probabilities_are_returned_unstreamed_and_refused_for_a_stream(
    served: Served,
) -> None:
    body = {**SUM, "prompt_logprobs": 1}
    answer = await ask(served.url, served.server, body)
    first, *others = answer.body["prompt_logprobs"]
    assert (first, all(others)) == (None, True)
    for url in (served.server.url, served.url):
        refused = await post(url, {**body, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_function_named_by_tool_choice_is_called(served: Served) -> None:
    answer = await ask(served.url, served.server, {**TIME, "tool_choice": THIS_TOOL})
    assert (answer.status, answer.finish_reason) == (200, "tool_calls"), answer.body
    (call,) = answer.body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"


async def test_tool_choice_required_leads_to_a_client_call_or_a_sandbox_call(
    served: Served,
) -> None:
    """The call may be of the client's function or of a sandbox tool."""
    answer = await ask(served.url, served.server, {**TIME, "tool_choice": "required"})
    assert answer.status == 200, answer.body
    assert answer.finish_reason == "tool_calls" or answer.steps, answer.body


async def test_proxy_reports_the_context_window_and_tokenization_of_the_model_server(
    served: Served,
) -> None:
    listed = (await request_path(served.url, "/v1/models")).json()["data"]
    assert [each["max_model_len"] for each in listed if each["id"] == MODEL] == [WINDOW]
    text = {"model": MODEL, "prompt": "Hello there"}
    proxied, direct_answer = [
        await request_path(url, "/tokenize", text) for url in (served.url, served.server.url)
    ]
    assert (proxied.status_code, proxied.content) == (200, direct_answer.content)


async def test_request_is_relayed_with_a_reason_header_if_the_model_server_has_no_tool_parser(
    refusing: Served,
) -> None:
    refused = await post(refusing.server.url, {**TIME, "tool_choice": "auto"})
    direct = await post(refusing.server.url, SUM)
    first = await post(refusing.url, SUM)
    later = first
    with anyio.fail_after(PATIENCE_S):
        while later.headers.get("x-sandbox-route") is None:
            later = await post(refusing.url, SUM)
    assert refused.status_code == 400
    assert later.headers["x-sandbox-route"] == "tools_refused"
    assert "--tool-call-parser" in later.headers["x-sandbox-route-detail"]
    for answer in (first, later):
        assert answer_text(answer) == answer_text(direct)
        assert answer.json().get("sandbox", {"route": "tools_refused"})["route"] == "tools_refused"


def answer_text(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])
