"""Requests without a sandbox spend of the day too, and what nobody can reckon is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from policies.budgets import DailyBudget, Expense
from policies.limits import Limits
from proxy.models.scripted import text_reply
from tests.clients.budgets import ASK, BODIES, LAST, STEP, opened
from tests.fakes.backend import Refusal

# Requests that are passed on, and those that the model answers alone


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_request_counts_what_its_answer_tells(stream: bool, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "fake-model:plain", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with opened(tmp_path, DailyBudget(tokens=1000, cost_usd=9), [LAST]) as there:
        answered = await there.ask(**body)
        assert answered.status_code == 200
        spent = await there.spent()
        assert (spent.runs, spent.tokens, spent.cost_usd) == (0, 1000, pytest.approx(1.0))
        refused = await there.ask(**body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "insufficient_quota")
        assert len(there.backend.requests) == 1


async def test_a_stream_that_tells_no_usage_is_reckoned(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(tokens=10_000), [text_reply("abc " * 80)]) as there:
        long = [{"role": "user", "content": "x" * 4000}]
        await there.ask(model="fake-model:plain", stream=True, messages=long)
        events = 320 // 8
        assert 1000 + events <= (await there.spent()).tokens <= 1100 + events


async def test_a_plain_request_that_is_refused_has_spent_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(tokens=1000), [Refusal(400)]) as there:
        assert (await there.ask(model="fake-model:plain")).status_code == 400
        assert await there.spent() == Expense()


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/embeddings", {"prompt_tokens": 70, "total_tokens": 70}),
        ("/v1/completions", {"prompt_tokens": 50, "completion_tokens": 20}),
        ("/v1/responses", {"input_tokens": 50, "output_tokens": 20}),
        ("/v1/messages", {"input_tokens": 50, "output_tokens": 20}),
    ],
)
async def test_what_other_paths_spend_counts_too(
    path: str, usage: Mapping[str, int], tmp_path: Path
) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.method == "GET" or request.headers["accept-encoding"] == "identity"
        return web.json_response({"data": [], "usage": usage})

    async with opened(tmp_path, DailyBudget(tokens=70), elsewhere=answer) as there:
        headers = {"authorization": "Bearer mine"}
        asked = {"model": "fake-model:plain", "input": "Hello.", "messages": [ASK]}
        statuses = [
            (await there.http.post(path, json=asked, headers=headers)).status_code for _ in range(2)
        ]
        assert (statuses, (await there.spent()).tokens) == ([200, 429], 70)
        looked = await there.http.get("/version", headers=headers)
        assert looked.status_code == 200


async def test_what_a_chat_ui_asks_for_itself_counts_as_tokens(tmp_path: Path) -> None:
    per_day = DailyBudget(runs=0, tokens=1000, commands=0)
    async with opened(tmp_path, per_day, [LAST]) as there:
        path = "/v1/responses"
        assert (await there.ask(path, tool_choice="none")).status_code == 200
        spent = await there.spent()
        assert (spent.runs, spent.tokens) == (0, 1000)
        assert (await there.ask(path, tool_choice="none")).status_code == 429


# Cost that nobody knows


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["unheard-of", "unheard-of:plain"])
async def test_a_model_without_a_price_is_refused_where_cost_is_bounded(
    path: str, model: str, tmp_path: Path
) -> None:
    async with opened(tmp_path, DailyBudget(cost_usd=5.0)) as there:
        refused = await there.ask(path, model=model)
        assert refused.status_code == 400
        assert "'unheard-of' costs is not known" in refused.json()["error"]["message"]
        assert there.backend.requests == []


async def test_the_same_holds_for_the_bound_of_a_run(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(), limits=Limits(max_cost_usd=5.0)) as there:
        error = (await there.ask(model="unheard-of")).json()["error"]
        assert (error["code"], error["param"]) == ("model_price_unknown", "model")
        assert (await there.ask(model="gpt-4o")).status_code == 200


async def test_a_request_may_bound_its_own_cost(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(), [STEP, LAST]) as there:
        bounded = {"limits": {"max_cost_usd": 0.5}}
        answered = (await there.ask(sandbox=bounded)).json()
        assert answered["sandbox"]["stop_reason"] == "cost_budget"
        assert (await there.ask(sandbox=bounded, model="unheard-of")).status_code == 400


async def test_the_cost_is_told_where_it_is_known(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget()) as there:
        known = (await there.ask()).json()["usage"]["sandbox"]
        assert (known["cost_microusd"], known["commands"]) == (2_000_000, 1)
        unknown = (await there.ask(model="unheard-of")).json()["usage"]["sandbox"]
        assert "cost_microusd" not in unknown
        assert json.dumps(unknown["egress_bytes"]) == "0"
