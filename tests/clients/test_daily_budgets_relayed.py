"""Daily budgets for requests without a sandbox, and models whose cost is unknown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from policies.budgets import DailyBudget, Expense
from policies.limits import Limits
from proxy.models.scripted import text_reply
from tests.clients.budget_server import BODIES, FINAL_ANSWER, MESSAGE, STEP, budget_server
from tests.fakes.backend import Refusal

# Requests that are passed on, and those that the model answers alone


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_request_spends_the_reported_usage(stream: bool, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "fake-model:plain", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with budget_server(
        tmp_path, DailyBudget(tokens=1000, cost_usd=9), [FINAL_ANSWER]
    ) as server:
        answered = await server.post(**body)
        assert answered.status_code == 200
        spent = await server.spent()
        assert (spent.runs, spent.tokens, spent.cost_usd) == (0, 1000, pytest.approx(1.0))
        refused = await server.post(**body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "insufficient_quota")
        assert len(server.backend.requests) == 1


async def test_tokens_of_a_relayed_stream_are_estimated_if_it_reports_no_usage(
    tmp_path: Path,
) -> None:
    async with budget_server(
        tmp_path, DailyBudget(tokens=10_000), [text_reply("abc " * 80)]
    ) as server:
        long = [{"role": "user", "content": "x" * 4000}]
        await server.post(model="fake-model:plain", stream=True, messages=long)
        events = 320 // 8
        assert 1000 + events <= (await server.spent()).tokens <= 1100 + events


async def test_refused_plain_request_spends_nothing(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(tokens=1000), [Refusal(400)]) as server:
        assert (await server.post(model="fake-model:plain")).status_code == 400
        assert await server.spent() == Expense()


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/embeddings", {"prompt_tokens": 70, "total_tokens": 70}),
        ("/v1/completions", {"prompt_tokens": 50, "completion_tokens": 20}),
        ("/v1/responses", {"input_tokens": 50, "output_tokens": 20}),
        ("/v1/messages", {"input_tokens": 50, "output_tokens": 20}),
    ],
)
async def test_relayed_requests_of_each_api_spend_tokens(
    path: str, usage: Mapping[str, int], tmp_path: Path
) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.method == "GET" or request.headers["accept-encoding"] == "identity"
        return web.json_response({"data": [], "usage": usage})

    async with budget_server(tmp_path, DailyBudget(tokens=70), elsewhere=answer) as server:
        headers = {"authorization": "Bearer mine"}
        asked = {"model": "fake-model:plain", "input": "Hello.", "messages": [MESSAGE]}
        statuses = [
            (await server.http.post(path, json=asked, headers=headers)).status_code
            for _ in range(2)
        ]
        assert (statuses, (await server.spent()).tokens) == ([200, 429], 70)
        looked = await server.http.get("/version", headers=headers)
        assert looked.status_code == 200


async def test_request_without_a_sandbox_spends_daily_tokens_but_no_run(tmp_path: Path) -> None:
    per_day = DailyBudget(runs=0, tokens=1000, commands=0)
    async with budget_server(tmp_path, per_day, [FINAL_ANSWER]) as server:
        path = "/v1/responses"
        assert (await server.post(path, tool_choice="none")).status_code == 200
        spent = await server.spent()
        assert (spent.runs, spent.tokens) == (0, 1000)
        assert (await server.post(path, tool_choice="none")).status_code == 429


# Models without a known price


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["unheard-of", "unheard-of:plain"])
async def test_model_without_a_price_is_refused_under_a_daily_cost_budget(
    path: str, model: str, tmp_path: Path
) -> None:
    async with budget_server(tmp_path, DailyBudget(cost_usd=5.0)) as server:
        refused = await server.post(path, model=model)
        assert refused.status_code == 400
        assert "no prices of the model 'unheard-of'" in refused.json()["error"]["message"]
        assert server.backend.requests == []


async def test_model_without_a_price_is_refused_under_a_run_cost_limit(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(), limits=Limits(max_cost_usd=5.0)) as server:
        error = (await server.post(model="unheard-of")).json()["error"]
        assert (error["code"], error["param"]) == ("model_price_unknown", "model")
        assert (await server.post(model="gpt-4o")).status_code == 200


async def test_request_can_limit_its_own_cost(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(), [STEP, FINAL_ANSWER]) as server:
        bounded = {"limits": {"max_cost_usd": 0.5}}
        answered = (await server.post(sandbox=bounded)).json()
        assert answered["sandbox"]["stop_reason"] == "cost_budget"
        assert (await server.post(sandbox=bounded, model="unheard-of")).status_code == 400


async def test_usage_contains_the_cost_if_the_price_is_known(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget()) as server:
        known = (await server.post()).json()["usage"]["sandbox"]
        assert (known["cost_microusd"], known["commands"]) == (2_000_000, 1)
        unknown = (await server.post(model="unheard-of")).json()["usage"]["sandbox"]
        assert "cost_microusd" not in unknown
        assert json.dumps(unknown["egress_bytes"]) == "0"
