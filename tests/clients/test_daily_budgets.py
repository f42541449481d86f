"""Daily budgets of a key: refusals, runs that exhaust the budget, and exact counting."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from policies.budgets import DAY_S, DailyBudget, Expense
from policies.limits import StopReason
from policies.prompts import NO_BUDGET, WHY_NO_MORE_TOOLS
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, tool_reply
from tests.clients.budget_server import (
    BODIES,
    FINAL_ANSWER,
    MESSAGE,
    MORNING,
    STEP,
    SUBMIT,
    BudgetServer,
    budget_server,
)
from tests.clients.openai_errors import openai_client
from tests.clients.openai_errors import request_error as sdk_refused
from tests.fakes.backend import Held, Item, Refusal
from tests.stores import connected


def stop_reason(response: httpx.Response) -> str:
    """Return the run's stop reason from a response of any API, streamed or not."""
    assert response.status_code == 200, response.text
    text = response.text
    at = text.rindex('"stop_reason": "', 0, text.rindex('"steps": ')) + len('"stop_reason": "')
    return text[at : text.index('"', at)]


# Before a run


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_key_over_its_daily_budget_is_refused_until_midnight(
    path: str, stream: bool, tmp_path: Path
) -> None:
    async with budget_server(tmp_path, DailyBudget(tokens=2000)) as server:
        assert (await server.post(path, stream=stream)).status_code == 200
        asked = len(server.backend.requests)
        response = await server.post(path, stream=stream)
        assert (response.status_code, len(server.backend.requests)) == (429, asked)
        assert response.headers["retry-after"] == str(DAY_S - 3600)
        assert (
            "x-should-retry" not in response.headers
        )  # Retry-After already tells the SDK when to retry
        error = response.json()["error"]
        assert "daily budget of tokens is used up" in error["message"]
        if path != "/v1/messages":
            assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        else:
            assert error["type"] == "rate_limit_error"
        server.clock.now = MORNING + DAY_S - 3600
        assert (await server.post(path, stream=stream)).status_code == 200


async def test_sdk_raises_rate_limit_error_without_a_retry_if_the_daily_budget_is_spent(
    tmp_path: Path,
) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=0)) as server:
        async with openai_client(server.url, "mine").with_options(max_retries=3) as client:
            error = await sdk_refused(client)
        assert isinstance(error, openai.RateLimitError)
        assert error.code == "insufficient_quota"
        assert server.backend.requests == []


@pytest.mark.parametrize(
    ("per_day", "name"),
    [
        (DailyBudget(runs=1), "runs"),
        (DailyBudget(tokens=2000), "tokens"),
        (DailyBudget(cost_usd=2.0), "cost"),
        (DailyBudget(commands=1), "tool calls"),
        (DailyBudget(cpu_s=0), "processor time"),
        (DailyBudget(tool_output_chars=1), "tool output"),
    ],
)
async def test_error_names_the_exhausted_budget(
    per_day: DailyBudget, name: str, tmp_path: Path
) -> None:
    async with budget_server(tmp_path, per_day) as server:
        await server.post()
        response = await server.post()
        assert response.status_code == 429
        assert f"daily budget of {name} is" in response.json()["error"]["message"]


async def test_each_key_has_its_own_daily_budget(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=1)) as server:
        assert [(await server.post(key=key)).status_code for key in ("mine", "mine", "yours")] == [
            200,
            429,
            200,
        ]


async def test_key_policy_can_lower_the_daily_budget(tmp_path: Path) -> None:
    mine = Key("mine", policy={"budgets": {"daily": {"runs": 1, "tokens": 2500}}})
    keyring = Keyring([("mine", mine), ("yours", Key("yours"))])
    async with budget_server(tmp_path, DailyBudget(runs=2), keyring=keyring) as server:
        assert (await server.post()).status_code == 200
        assert (await server.post()).status_code == 429
        plain = [await server.post(model="fake-model:plain") for _ in range(2)]
        assert [each.status_code for each in plain] == [200, 429]
        others = [(await server.post(key="yours")).status_code for _ in range(3)]
        assert others == [200, 200, 429]


async def test_server_without_keys_has_one_daily_budget_for_all_clients(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=1), keyring=Keyring()) as server:
        statuses = [(await server.post(key=key)).status_code for key in ("mine", "yours", "new")]
        assert statuses == [200, 429, 429]


async def test_rotated_secret_keeps_the_daily_budget(tmp_path: Path) -> None:
    keyring = Keyring([("old", Key("mine")), ("new", Key("mine"))])
    async with budget_server(tmp_path, DailyBudget(runs=1), keyring=keyring) as server:
        assert [(await server.post(key=key)).status_code for key in ("old", "new")] == [200, 429]


async def test_each_choice_counts_as_a_run(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=3)) as server:
        assert (await server.post(n=2)).status_code == 200
        assert (await server.post(n=2)).status_code == 429
        assert (await server.post(n=1)).status_code == 200
        assert await server.spent() == Expense(
            runs=3, tokens=6000, cost_usd=pytest.approx(6.0), commands=3, tool_output_chars=69
        )


async def test_invalid_and_repeated_requests_spend_nothing(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=1)) as server:
        assert (await server.post(n=0)).status_code == 400
        named = {"Idempotency-Key": "one", "authorization": "Bearer mine"}
        asked = {"model": "fake-model", "messages": [MESSAGE]}
        for _ in range(2):
            path = "/v1/chat/completions"
            again = await server.http.post(path, json=asked, headers=named)
            assert again.status_code == 200
        assert (await server.spent()).runs == 1


@pytest.mark.parametrize("path", BODIES)
async def test_joining_a_run_of_another_process_spends_nothing(path: str, tmp_path: Path) -> None:
    budget, statuses = DailyBudget(runs=2), []
    async with budget_server(tmp_path, budget) as here, budget_server(tmp_path, budget) as server:

        async def ask(side: BudgetServer) -> None:
            side.http.headers["Idempotency-Key"] = "order-1"
            statuses.append((await side.post(path)).status_code)

        async with asyncio.TaskGroup() as group:
            for side in (here, server) * 3:
                group.create_task(ask(side))
        spent = await here.spent()
    assert (statuses, spent.runs) == ([200] * 6, 1)


async def test_spending_is_not_counted_without_a_budget(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget()) as server:
        await server.post()
        await server.post(model="fake-model:plain")
        assert await server.spent() == Expense()


async def test_request_with_a_daily_budget_fails_if_the_store_fails(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=9)) as server:
        with connected(tmp_path) as database:
            database.exec_driver_sql("DROP TABLE spending")
        response = await server.post()
        assert (response.status_code, response.json()["error"]["code"]) == (
            500,
            "internal_error",
        )
        assert server.backend.requests == []


async def test_restart_keeps_the_daily_spending(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(runs=1)) as server:
        assert (await server.post()).status_code == 200
    async with budget_server(tmp_path, DailyBudget(runs=1)) as server:
        assert (await server.post()).status_code == 429


# During a run


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("per_day", "reason"),
    [
        (DailyBudget(tokens=1000), "daily_token_budget"),
        (DailyBudget(cost_usd=1.0), "daily_cost_budget"),
        (DailyBudget(commands=1), "daily_command_budget"),
        (DailyBudget(tool_output_chars=5), "daily_tool_output_budget"),
    ],
)
async def test_daily_budget_exhausted_during_a_run_ends_the_run_with_an_answer(
    path: str, stream: bool, per_day: DailyBudget, reason: str, tmp_path: Path
) -> None:
    def script(body: dict[str, Any]) -> Item:
        return STEP if "tools" in body else FINAL_ANSWER

    async with budget_server(tmp_path, per_day, script) as server:
        answered = await server.post(path, stream=stream, sandbox={"steps": "events"})
        assert "About" in answered.text
        assert stop_reason(answered) == reason
        assert "tools" not in server.backend.requests[-1].body


async def test_calls_beyond_the_command_budget_are_refused_and_not_run(tmp_path: Path) -> None:
    one = call("execute_bash", command="echo a")
    async with budget_server(
        tmp_path, DailyBudget(commands=2), [tool_reply(one, one, one), FINAL_ANSWER]
    ) as server:
        answered = await server.post()
        assert stop_reason(answered) == "daily_command_budget"
        said = [m["content"] for m in server.backend.requests[1].body["messages"]]
        why = WHY_NO_MORE_TOOLS[StopReason.DAILY_COMMAND_BUDGET]
        refusals = said.count(NO_BUDGET.format(why=why))
        assert (refusals, (await server.spent()).commands) == (1, 2)


async def test_remaining_daily_budget_is_part_of_the_observation(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(tokens=1050)) as server:
        await server.post()
        observation = server.backend.requests[1].body["messages"][-1]["content"]
        assert "[50 tokens of today's budget remain. Hand in what you have.]" in observation


async def test_concurrent_runs_share_the_daily_budget(tmp_path: Path) -> None:
    """Every run is inside its first model call when the first command is requested."""
    together, waiting = asyncio.Event(), 0

    def script(body: dict[str, Any]) -> Item:
        nonlocal waiting
        if "tools" not in body:
            return FINAL_ANSWER
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said:
            return STEP
        waiting += 1
        if waiting == 6:
            together.set()
        return Held(STEP, together)

    async with budget_server(tmp_path, DailyBudget(commands=10), script) as server:
        answers = await asyncio.gather(*(server.post() for _ in range(6)))
        assert {stop_reason(answer) for answer in answers} == {"daily_command_budget"}
        assert (await server.spent()).commands == 10


async def test_pending_model_calls_reserve_their_prompt_tokens(tmp_path: Path) -> None:
    release = asyncio.Event()
    long = {"messages": [{"role": "user", "content": "x" * 8000}]}
    async with budget_server(
        tmp_path, DailyBudget(tokens=2000), lambda _: Held(SUBMIT, release)
    ) as server:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(server.post(**long))
            await server.backend.arrived(1)
            assert (await server.spent()).tokens >= 2000
            assert (await server.post()).status_code == 429
            release.set()
        assert first.result().status_code == 200
        assert (await server.spent()).tokens == 1000


async def test_disconnect_during_a_model_call_spends_the_prompt_tokens(tmp_path: Path) -> None:
    never = asyncio.Event()
    long = {"messages": [{"role": "user", "content": "x" * 8000}]}
    async with budget_server(
        tmp_path, DailyBudget(tokens=9999), lambda _: Held(SUBMIT, never)
    ) as server:
        asking = asyncio.create_task(server.post(**long))
        seen = await server.backend.arrived(1)
        asking.cancel()
        await seen.gone.wait()
        assert (await server.spent()).tokens >= 2000


async def test_failed_model_call_spends_no_tokens(tmp_path: Path) -> None:
    async with budget_server(tmp_path, DailyBudget(tokens=9999), [Refusal(400)]) as server:
        assert (await server.post()).status_code == 400
        assert await server.spent() == Expense(runs=1)


async def test_run_across_midnight_counts_for_its_first_day(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with budget_server(
        tmp_path, DailyBudget(tokens=9999), lambda _: Held(SUBMIT, release)
    ) as server:
        asking = asyncio.create_task(server.post())
        await server.backend.arrived(1)
        server.clock.now += DAY_S
        release.set()
        assert (await asking).status_code == 200
        assert await server.spent() == Expense()
        server.clock.now -= DAY_S
        assert (await server.spent()).tokens == 1000
