"""Features of the llama.cpp server: its own request fields, its token ids, and the time of loading
its model."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import anyio
import httpx
import pytest

from bench.servers import free_port
from tests.engines.conftest import Served
from tests.engines.engine import REQUEST_TIMEOUT_S
from tests.engines.measured_requests import (
    ANSWERED,
    PATIENCE_S,
    SHORT,
    UNREACHABLE,
    ask,
    captured_replies,
    outcome,
    post,
    request,
)
from tests.engines.prompts import CITY, book
from tests.engines.servers import model_server, proxy, tools_always

pytestmark = pytest.mark.engine
WINDOW = 2048
LOADING = (503, "503")
SLOT = 0
MEDIAN_DIFFERENCE, MAX_DIFFERENCE = 0.01, 0.5
"""Bounds of the difference of two log probabilities of one token: the server computes a prompt in
another order than a reply."""


async def test_json_schema_field_is_enforced(served: Served) -> None:
    body = request("What is the capital of France?", max_tokens=100, json_schema=CITY)
    answer = await ask(served.url, served.server, body)
    assert answer.status == 200, answer.body
    assert list(json.loads(answer.text)) == ["city"]


async def test_context_error_contains_the_token_counts(served: Served) -> None:
    body = request("Hello.")
    body["messages"].insert(0, {"role": "system", "content": book(400)})
    response = await post(served.url, body)
    error = response.json()["error"]
    assert error["n_ctx"] == WINDOW < error["n_prompt_tokens"]


async def test_captured_log_probabilities_are_near_those_that_the_server_recomputes(
    served: Served,
) -> None:
    # The reference style goes on after a turn without a call, which a small model seldom makes.
    agent = {"capture_tokens": True, "style": "reference"}
    profiles = {"default": {"agent": agent, "limits": {"max_turns": 3, "final_question": False}}}
    body = request("Count the files.", max_tokens=40, temperature=1, seed=7)
    async with (
        proxy(served.server.url, profiles=profiles, **tools_always()) as ours,
        httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as http,
    ):
        url = f"http://127.0.0.1:{ours.port}"
        answered = await post(url, {**body, "sandbox": {"capture": "tokens"}})
        run = answered.headers["x-sandbox-run"]
        found = (await http.get(f"{url}/v1/runs/{run}/trajectory")).json()
        assert len(found["model_calls"]) == 3
        differences = []
        for reply in captured_replies(found):
            recomputed = await log_probabilities(
                http, served.server.url, reply.ids, reply.prompt_tokens
            )
            pairs = zip(reply.logprobs, recomputed, strict=True)
            differences += [abs(captured - other) for captured, other in pairs]
    assert statistics.median(differences) < MEDIAN_DIFFERENCE
    assert max(differences) < MAX_DIFFERENCE


async def log_probabilities(
    http: httpx.AsyncClient, url: str, ids: Sequence[int], start: int
) -> list[float]:
    """Return the log probability of each token from index `start`, after the tokens before it. The
    server computes the first `start` tokens again."""
    found = []
    for index in range(start, len(ids)):
        body = {
            "prompt": ids[:index],
            "n_predict": 1,
            "n_probs": 100,  # more than top_k, from which the token was sampled
            "id_slot": SLOT,
            "cache_prompt": index > start,
        }
        answer = (await http.post(f"{url}/completion", json=body)).raise_for_status().json()
        (position,) = answer["completion_probabilities"]
        likely = {each["id"]: each["logprob"] for each in position["top_logprobs"]}
        found.append(likely[ids[index]])
    return found


async def test_loading_model_server_is_retried_or_reported_depending_on_max_retries() -> None:
    port = free_port()
    backend, seen = f"http://127.0.0.1:{port}", []
    async with (
        proxy(backend, backend={"max_retries": 0}) as once,
        proxy(backend, backend={"max_retries": 9}) as again,
        anyio.create_task_group() as tasks,
    ):

        async def ask_until_it_answers() -> None:
            while not seen or seen[-1] != ANSWERED:
                seen.append(outcome(await post(f"http://127.0.0.1:{once.port}", SHORT)))
            answered_at_last.set()

        async def ask_once() -> None:
            waited.append(outcome(await post(f"http://127.0.0.1:{again.port}", SHORT)))
            answered.set()

        waited: list[tuple[int, Any]] = []
        answered, answered_at_last = anyio.Event(), anyio.Event()
        with anyio.fail_after(PATIENCE_S):
            tasks.start_soon(ask_until_it_answers)
            tasks.start_soon(ask_once)
            async with model_server(port=port):
                await answered.wait()
                await answered_at_last.wait()
    assert waited == [ANSWERED]
    assert set(seen) <= {UNREACHABLE, LOADING, ANSWERED}
