"""What one key may spend in a day: refused, ended gracefully, counted once, shared by all."""

import asyncio
import sqlite3
from contextlib import closing
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
from tests.clients.budgets import (
    ASK,
    BODIES,
    LAST,
    MORNING,
    STEP,
    SUBMIT,
    House,
    opened,
)
from tests.clients.errors import client_of
from tests.clients.errors import refused as sdk_refused
from tests.fakes.backend import Held, Item, Refusal


def stop_reason(response: httpx.Response) -> str:
    """Of an answer in whatever dialect, streamed or not."""
    assert response.status_code == 200, response.text
    text = response.text
    at = text.rindex('"stop_reason": "', 0, text.rindex('"steps": ')) + len('"stop_reason": "')
    return text[at : text.index('"', at)]


# Before a run


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_has_spent_its_day_is_refused_until_midnight(
    path: str, stream: bool, tmp_path: Path
) -> None:
    async with opened(tmp_path, DailyBudget(tokens=2000)) as there:
        assert (await there.ask(path, stream=stream)).status_code == 200
        asked = len(there.backend.requests)
        refused = await there.ask(path, stream=stream)
        assert (refused.status_code, len(there.backend.requests)) == (429, asked)
        assert refused.headers["retry-after"] == str(DAY_S - 3600)
        assert "x-should-retry" not in refused.headers  # Retry-After says it
        error = refused.json()["error"]
        assert "daily budget of tokens is used up" in error["message"]
        if path != "/v1/messages":
            assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        else:
            assert error["type"] == "rate_limit_error"
        there.clock.now = MORNING + DAY_S - 3600
        assert (await there.ask(path, stream=stream)).status_code == 200


async def test_the_sdk_knows_the_error_and_asks_once(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=0)) as there:
        async with client_of(there.url, "mine").with_options(max_retries=3) as client:
            error = await sdk_refused(client)
        assert isinstance(error, openai.RateLimitError)
        assert error.code == "insufficient_quota"
        assert there.backend.requests == []


@pytest.mark.parametrize(
    ("per_day", "name"),
    [
        (DailyBudget(runs=1), "requests"),
        (DailyBudget(tokens=2000), "tokens"),
        (DailyBudget(cost_usd=2.0), "cost"),
        (DailyBudget(commands=1), "tool calls"),
        (DailyBudget(cpu_s=0), "processor time"),
        (DailyBudget(tool_output_chars=1), "tool output"),
    ],
)
async def test_the_error_names_what_is_used_up(
    per_day: DailyBudget, name: str, tmp_path: Path
) -> None:
    async with opened(tmp_path, per_day) as there:
        await there.ask()
        refused = await there.ask()
        assert refused.status_code == 429
        assert f"daily budget of {name} is" in refused.json()["error"]["message"]


async def test_each_key_has_a_day_of_its_own(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=1)) as there:
        assert [(await there.ask(key=key)).status_code for key in ("mine", "mine", "yours")] == [
            200,
            429,
            200,
        ]


async def test_a_key_may_have_less_than_the_others(tmp_path: Path) -> None:
    mine = Key("mine", policy={"budgets": {"daily": {"runs": 1, "tokens": 2500}}})
    keyring = Keyring([("mine", mine), ("yours", Key("yours"))])
    async with opened(tmp_path, DailyBudget(runs=2), keyring=keyring) as there:
        assert (await there.ask()).status_code == 200
        assert (await there.ask()).status_code == 429
        plain = [await there.ask(model="fake-model:plain") for _ in range(2)]
        assert [each.status_code for each in plain] == [200, 429]
        others = [(await there.ask(key="yours")).status_code for _ in range(3)]
        assert others == [200, 200, 429]


async def test_where_no_key_is_needed_all_share_one_day(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=1), keyring=Keyring()) as there:
        statuses = [(await there.ask(key=key)).status_code for key in ("mine", "yours", "new")]
        assert statuses == [200, 429, 429]


async def test_a_new_secret_is_no_new_day(tmp_path: Path) -> None:
    keyring = Keyring([("old", Key("mine")), ("new", Key("mine"))])
    async with opened(tmp_path, DailyBudget(runs=1), keyring=keyring) as there:
        assert [(await there.ask(key=key)).status_code for key in ("old", "new")] == [200, 429]


async def test_every_choice_is_a_run(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=3)) as there:
        assert (await there.ask(n=2)).status_code == 200
        assert (await there.ask(n=2)).status_code == 429
        assert (await there.ask(n=1)).status_code == 200
        assert await there.spent() == Expense(
            runs=3, tokens=6000, cost_usd=pytest.approx(6.0), commands=3, tool_output_chars=69
        )


async def test_a_request_that_is_wrong_or_comes_again_spends_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=1)) as there:
        assert (await there.ask(n=0)).status_code == 400
        named = {"Idempotency-Key": "one", "authorization": "Bearer mine"}
        asked = {"model": "fake-model", "messages": [ASK]}
        for _ in range(2):
            path = "/v1/chat/completions"
            again = await there.http.post(path, json=asked, headers=named)
            assert again.status_code == 200
        assert (await there.spent()).runs == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_joins_a_run_of_another_process_spends_nothing(
    path: str, tmp_path: Path
) -> None:
    budget, statuses = DailyBudget(runs=2), []
    async with opened(tmp_path, budget) as here, opened(tmp_path, budget) as there:

        async def ask(side: House) -> None:
            side.http.headers["Idempotency-Key"] = "order-1"
            statuses.append((await side.ask(path)).status_code)

        async with asyncio.TaskGroup() as group:
            for side in (here, there) * 3:
                group.create_task(ask(side))
        spent = await here.spent()
    assert (statuses, spent.runs) == ([200] * 6, 1)


async def test_without_a_budget_nothing_is_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget()) as there:
        await there.ask()
        await there.ask(model="fake-model:plain")
        assert await there.spent() == Expense()


async def test_a_store_that_fails_is_no_way_around_the_budget(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=9)) as there:
        with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as vandal:
            vandal.execute("DROP TABLE spending")
            vandal.commit()
        refused = await there.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
        assert there.backend.requests == []


async def test_a_restart_of_the_server_is_no_new_day(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(runs=1)) as there:
        assert (await there.ask()).status_code == 200
    async with opened(tmp_path, DailyBudget(runs=1)) as there:
        assert (await there.ask()).status_code == 429


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
async def test_a_day_that_ends_during_a_run_ends_it_in_an_answer(
    path: str, stream: bool, per_day: DailyBudget, reason: str, tmp_path: Path
) -> None:
    def script(body: dict[str, Any]) -> Item:
        return STEP if "tools" in body else LAST

    async with opened(tmp_path, per_day, script) as there:
        answered = await there.ask(path, stream=stream, sandbox={"steps": "events"})
        assert "About" in answered.text
        assert stop_reason(answered) == reason
        assert "tools" not in there.backend.requests[-1].body


async def test_the_rest_of_a_turn_is_answered_and_not_run(tmp_path: Path) -> None:
    one = call("execute_bash", command="echo a")
    async with opened(
        tmp_path, DailyBudget(commands=2), [tool_reply(one, one, one), LAST]
    ) as there:
        answered = await there.ask()
        assert stop_reason(answered) == "daily_command_budget"
        said = [m["content"] for m in there.backend.requests[1].body["messages"]]
        why = WHY_NO_MORE_TOOLS[StopReason.DAILY_COMMAND_BUDGET]
        refusals = said.count(NO_BUDGET.format(why=why))
        assert (refusals, (await there.spent()).commands) == (1, 2)


async def test_the_model_is_told_what_remains_of_the_day(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(tokens=1050)) as there:
        await there.ask()
        told = there.backend.requests[1].body["messages"][-1]["content"]
        assert "[50 tokens of today's budget remain. Hand in what you have.]" in told


async def test_runs_at_the_same_time_share_one_day(tmp_path: Path) -> None:
    """All are in the middle of their first call when the first command is asked for."""
    together, waiting = asyncio.Event(), 0

    def script(body: dict[str, Any]) -> Item:
        nonlocal waiting
        if "tools" not in body:
            return LAST
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said:
            return STEP
        waiting += 1
        if waiting == 6:
            together.set()
        return Held(STEP, together)

    async with opened(tmp_path, DailyBudget(commands=10), script) as there:
        answers = await asyncio.gather(*(there.ask() for _ in range(6)))
        assert {stop_reason(answer) for answer in answers} == {"daily_command_budget"}
        assert (await there.spent()).commands == 10


async def test_calls_at_the_same_time_count_before_they_are_answered(tmp_path: Path) -> None:
    release = asyncio.Event()
    long = {"messages": [{"role": "user", "content": "x" * 8000}]}
    async with opened(tmp_path, DailyBudget(tokens=2000), lambda _: Held(SUBMIT, release)) as there:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(there.ask(**long))
            await there.backend.arrived(1)
            assert (await there.spent()).tokens >= 2000
            assert (await there.ask()).status_code == 429
            release.set()
        assert first.result().status_code == 200
        assert (await there.spent()).tokens == 1000


async def test_who_leaves_in_the_middle_of_a_call_has_spent_its_prompt(tmp_path: Path) -> None:
    never = asyncio.Event()
    long = {"messages": [{"role": "user", "content": "x" * 8000}]}
    async with opened(tmp_path, DailyBudget(tokens=9999), lambda _: Held(SUBMIT, never)) as there:
        asking = asyncio.create_task(there.ask(**long))
        seen = await there.backend.arrived(1)
        asking.cancel()
        await seen.gone.wait()
        assert (await there.spent()).tokens >= 2000


async def test_a_call_that_failed_has_spent_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, DailyBudget(tokens=9999), [Refusal(400)]) as there:
        assert (await there.ask()).status_code == 400
        assert await there.spent() == Expense(runs=1)


async def test_what_runs_over_midnight_counts_to_the_day_it_began(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with opened(tmp_path, DailyBudget(tokens=9999), lambda _: Held(SUBMIT, release)) as there:
        asking = asyncio.create_task(there.ask())
        await there.backend.arrived(1)
        there.clock.now += DAY_S
        release.set()
        assert (await asking).status_code == 200
        assert await there.spent() == Expense()
        there.clock.now -= DAY_S
        assert (await there.spent()).tokens == 1000
