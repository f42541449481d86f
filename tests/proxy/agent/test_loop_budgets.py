"""Budgets: checked before each expense; a run that reaches one ends with an answer."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.budgets import DailyBudget, Expense
from policies.limits import Limits, StopReason
from policies.prices import Price
from policies.prompts import NO_BUDGET, WHY_NO_MORE_TOOLS, final_answer_request
from policies.sessions import Session, SessionState
from proxy.agent.budget import DailyBudgetUse, RunBudget
from proxy.agent.events import Event, ToolOutput
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from sandbox_runtime.egress.decision import DeniedError
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import LOOKUP, SUBMIT, USER, Events, Run, bash, valid
from tests.stores import open_store

COUNTED = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "total_tokens": 1100,
    "prompt_tokens_details": {"cached_tokens": 500},
}
TARIFF = ((0, Price(1000.0, 1000.0, cached_per_mtok=200.0)),)
"""A call with the usage COUNTED costs 0.7 USD, and the prompt of the next call at least 0.2 USD."""
STEP = {**tool_reply(bash("echo a")), "usage": COUNTED}
LAST = text_reply("About 42.")
MIB = 1 << 20


def refusal(stop: StopReason) -> str:
    return NO_BUDGET.format(why=WHY_NO_MORE_TOOLS[stop])


def observations(request: Mapping[str, Any]) -> list[str]:
    """Return the observations in the messages of a request."""
    return [each["content"] for each in request["messages"] if each["role"] == "tool"]


class Downloading(Events):
    """Records events, and counts network traffic of the sandbox while a command runs."""

    def __init__(self, sandboxes: MemorySandboxes, count: int) -> None:
        super().__init__(self._download)
        self._sandboxes = sandboxes
        self._count = count

    async def _download(self, event: Event) -> None:
        if isinstance(event, ToolOutput):
            self._sandboxes.leased[-1].traffic.reserve(self._count, now=0.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(max_cost_usd=1.4), StopReason.COST_BUDGET),
        (Limits(max_cost_usd=1.5), StopReason.COST_BUDGET),  # the next prompt would be too much
        (Limits(max_total_tokens=3100), StopReason.TOKEN_BUDGET),
        (Limits(max_commands=2), StopReason.COMMAND_BUDGET),
        (Limits(max_egress_mib=2), StopReason.EGRESS_BUDGET),
    ],
)
async def test_each_budget_ends_the_run_with_a_final_answer(
    limits: Limits, stop: StopReason, stream: bool
) -> None:
    model = ScriptedModel([STEP, STEP, LAST])
    sandboxes = MemorySandboxes()
    run = Run(model, sandboxes, limits=limits, events=Downloading(sandboxes, MIB))
    result = await run.go(stream=stream, tariff=TARIFF)
    assert (result.answer, result.stop_reason, result.finish_reason) == ("About 42.", stop, "stop")
    assert run.events.answer == "About 42."
    assert [("tools" in request) for request in model.requests] == [True, True, False]
    assert model.requests[-1]["messages"][-1]["content"] == final_answer_request(stop)
    assert valid(model.requests[-1])


async def test_calls_beyond_the_budget_get_an_observation_and_are_not_run() -> None:
    calls = tool_reply(bash("echo a"), bash("touch b"), call("str_replace_editor"))
    model = ScriptedModel([calls, LAST])
    run = Run(model, limits=Limits(max_commands=1))
    result = await run.go()
    assert result.stop_reason is StopReason.COMMAND_BUDGET
    refused = refusal(StopReason.COMMAND_BUDGET)
    assert observations(model.requests[1]) == ["Exit code: 0\n[stdout]\na", refused, refused]
    assert (result.stats.commands, len(run.events.observations)) == (1, 1)


async def test_exhausted_output_budget_skips_the_other_calls_of_the_turn() -> None:
    model = ScriptedModel([tool_reply(bash("echo a"), bash("echo b")), LAST])
    result = await Run(model, limits=Limits(max_tool_output_chars=5)).go()
    assert result.stop_reason is StopReason.TOOL_OUTPUT_BUDGET
    assert observations(model.requests[1])[1] == refusal(StopReason.TOOL_OUTPUT_BUDGET)


async def test_submit_in_a_turn_with_a_call_beyond_the_budget_is_accepted() -> None:
    calls = tool_reply(bash("echo a"), bash("echo b"), call("submit", answer="42"))
    result = await Run(ScriptedModel([calls]), limits=Limits(max_commands=1)).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


async def test_client_tools_can_be_called_beyond_the_command_budget() -> None:
    calls = tool_reply(bash("echo a"), bash("echo b"), call("lookup"))
    run = Run(ScriptedModel([calls]), limits=Limits(max_commands=1))
    result = await run.go(client_tools=[LOOKUP])
    assert result.stop_reason is StopReason.CLIENT_TOOL_CALLS
    assert [each["function"]["name"] for each in result.client_calls] == ["lookup"]


async def test_command_budget_of_zero_leads_to_an_answer_without_tool_calls() -> None:
    model = ScriptedModel([LAST])
    result = await Run(model, limits=Limits(max_commands=0)).go()
    assert (result.answer, result.stop_reason) == ("About 42.", StopReason.COMMAND_BUDGET)


# Traffic


async def test_traffic_is_capped_at_the_egress_budget() -> None:
    sandboxes = MemorySandboxes()
    seen: list[str] = []

    async def download(event: Event) -> None:
        if isinstance(event, ToolOutput):
            traffic = sandboxes.leased[-1].traffic
            traffic.reserve(MIB // 2, now=0.0)
            try:
                traffic.reserve(MIB, now=0.0)
            except Exception as error:  # noqa: BLE001 - a program in the sandbox gets any error
                seen.append(str(error))

    model = ScriptedModel([STEP, LAST])
    run = Run(model, sandboxes, limits=Limits(max_egress_mib=1), events=Events(download))
    result = await run.go()
    assert seen == ["the budget for network traffic is used up"]
    assert (result.stop_reason, result.stats.egress_bytes) == (StopReason.EGRESS_BUDGET, MIB)


async def test_replacement_sandbox_shares_the_egress_budget() -> None:
    sandboxes = MemorySandboxes()
    downloading = Downloading(sandboxes, MIB)

    async def download_and_lose(event: Event) -> None:
        await downloading._download(event)
        if isinstance(event, ToolOutput) and len(sandboxes.leased) == 1:
            await sandboxes.leased[0].close()

    model = ScriptedModel([STEP, STEP, STEP, LAST])
    limits = Limits(max_egress_mib=2)
    run = Run(model, sandboxes, limits=limits, events=Events(download_and_lose))
    result = await run.go()
    assert (result.stop_reason, result.stats.egress_bytes) == (StopReason.EGRESS_BUDGET, 2 * MIB)
    assert sandboxes.opened == 2


async def test_traffic_counts_toward_the_daily_budget_if_the_client_disconnects(
    tmp_path: Path,
) -> None:
    sandboxes = MemorySandboxes()
    with closing(open_store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(egress_mib=5))
        with anyio.CancelScope() as scope:

            async def download_and_leave(event: Event) -> None:
                if isinstance(event, ToolOutput):
                    sandboxes.leased[0].traffic.reserve(MIB, now=0.0)
                    scope.cancel()

            run = Run(ScriptedModel([STEP]), sandboxes, events=Events(download_and_leave))
            await run.go(account=account)
        spent = await store.spending.spent_today("mine")
        assert (spent.commands, spent.egress_bytes) == (1, MIB)


@pytest.mark.parametrize("per_day", [DailyBudget(egress_mib=5), DailyBudget(tokens=10**9), None])
async def test_sandbox_traffic_between_runs_is_denied_only_under_a_daily_egress_budget(
    per_day: DailyBudget | None, tmp_path: Path
) -> None:
    sandboxes = MemorySandboxes()
    with closing(open_store(tmp_path)) as store:
        account = store.spending.account("mine", per_day) if per_day else None
        run = Run(ScriptedModel([STEP, SUBMIT]), sandboxes, events=Downloading(sandboxes, MIB))
        await run.go(account=account)
        traffic = sandboxes.leased[0].traffic
        if per_day and per_day.egress_mib:
            with pytest.raises(DeniedError):
                traffic.reserve(1, now=0.0)
            assert (await store.spending.spent_today("mine")).egress_bytes == traffic.bytes == MIB
            task = make_task("r2", run.artifact_store, "m", [USER])
            RunBudget(task, Limits(), 0.0).track_traffic(traffic)
        traffic.reserve(MIB, now=0.0)
        assert traffic.bytes == 2 * MIB


# Cost


@pytest.mark.parametrize("stream", [False, True])
async def test_cost_that_the_backend_reports_takes_precedence_over_the_price(stream: bool) -> None:
    step = {**tool_reply(bash("echo a")), "usage": {**COUNTED, "cost": 0.001}}
    last = {**SUBMIT, "usage": {**COUNTED, "cost": 0.002}}
    result = await Run(ScriptedModel([step, last])).go(stream=stream, tariff=TARIFF)
    assert result.stop_reason is StopReason.SUBMITTED
    assert result.stats.cost_usd == pytest.approx(0.003)


async def test_cost_of_a_run_is_reported_only_if_the_cost_of_every_call_is_known() -> None:
    known = await Run(ScriptedModel([STEP, {**SUBMIT, "usage": COUNTED}])).go(tariff=TARIFF)
    assert known.stats.cost_usd == pytest.approx(1.4)
    step = {**STEP, "usage": {**COUNTED, "cost": 0.001}}
    unknown = await Run(ScriptedModel([step, {**SUBMIT, "usage": COUNTED}])).go()
    assert unknown.stats.cost_usd is None


async def test_token_budget_applies_if_the_backend_reports_no_usage() -> None:
    chatty = tool_reply(bash("echo a"), content="x" * 8000)
    model = ScriptedModel([chatty, chatty, chatty, LAST])
    result = await Run(model, limits=Limits(max_total_tokens=4000)).go()
    assert result.stop_reason is StopReason.TOKEN_BUDGET
    assert result.stats.llm_calls < 4


# Reminders


def reminders(model: ScriptedModel) -> list[str]:
    """Return the reminders in the observations of the last request."""
    lines = [line for text in observations(model.requests[-1]) for line in text.split("\n")]
    return [line for line in lines if line.startswith("[") and "remain" in line]


async def test_model_is_reminded_of_a_low_budget_once_per_reminder_level() -> None:
    model = ScriptedModel([*[tool_reply(bash("true"))] * 19, SUBMIT])
    await Run(model, limits=Limits(max_turns=20)).go()
    assert reminders(model) == [
        "[4 steps remain.]",
        "[3 steps remain. Hand in what you have.]",
    ]


async def test_budget_reminders_do_not_change_earlier_messages() -> None:
    model = ScriptedModel([*[tool_reply(bash("true"))] * 9, SUBMIT])
    await Run(model, limits=Limits(max_turns=10)).go()
    for earlier, later in zip(model.requests, model.requests[1:], strict=False):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]


async def test_budget_reminder_follows_the_newest_observation() -> None:
    model = ScriptedModel([tool_reply(bash("echo a"), bash("echo b")), SUBMIT])
    await Run(model, limits=Limits(max_commands=3, max_turns=100)).go()
    first, second = observations(model.requests[1])
    assert (first, second) == ("Exit code: 0\n[stdout]\na", "Exit code: 0\n[stdout]\nb")
    model = ScriptedModel([tool_reply(bash("echo a"), bash("echo b")), SUBMIT])
    await Run(model, limits=Limits(max_commands=3, max_turns=4)).go()
    assert observations(model.requests[1]) == [
        "Exit code: 0\n[stdout]\na",
        "Exit code: 0\n[stdout]\nb\n[3 steps remain. Hand in what you have.]",
    ]


async def test_budget_reminders_can_be_disabled() -> None:
    model = ScriptedModel([tool_reply(bash("true")), SUBMIT])
    await Run(model, limits=Limits(max_turns=2, tell_remaining=False)).go()
    assert reminders(model) == []


async def test_short_run_gets_no_budget_reminder() -> None:
    model = ScriptedModel([tool_reply(bash("true")), SUBMIT])
    with anyio.fail_after(10):
        await Run(model).go()
    assert reminders(model) == []


async def test_suspended_run_contains_no_budget_reminder() -> None:
    limits = Limits(max_tool_output_chars=25)  # of which 24 are used
    run = Run(ScriptedModel([tool_reply(bash("true"), call("lookup"))]), limits=limits)
    result = await run.go(
        client_tools=[LOOKUP], suspend_as=SessionState(Session("somebody", "run:r1"), "parked")
    )
    assert result.suspended_run
    assert "remain" not in str(result.suspended_run.messages[1:])


async def test_call_beyond_the_tool_call_limit_of_the_client_is_not_counted_as_a_command(
    tmp_path: Path,
) -> None:
    calls = tool_reply(bash("echo a"), bash("echo b"))
    with closing(open_store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(commands=9))
        run = Run(ScriptedModel([calls, SUBMIT]), limits=Limits(max_commands=2))
        result = await run.go(max_tool_calls=1, account=account)
        spent = await store.spending.spent_today("mine")
    assert (result.answer, result.stats.commands, spent.commands) == ("42", 1, 1)


async def test_settled_expense_above_its_reservation_can_exhaust_the_daily_budget(
    tmp_path: Path,
) -> None:
    with closing(open_store(tmp_path)) as store:
        day = DailyBudgetUse(store.spending.account("mine", DailyBudget(tokens=1000)))
        reservation = await day.pop_call_reservation(Expense(tokens=100))
        await day.settle(reservation, Expense(tokens=1000))
        assert day.is_over


async def test_reservation_of_a_model_call_that_is_not_made_is_refunded(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        day = DailyBudgetUse(store.spending.account("mine", DailyBudget(tokens=1000)))
        assert await day.reserve_call(Expense(tokens=100)) is None
        assert await day.reserve_call(Expense(tokens=50)) is None
        await day.settle(await day.pop_call_reservation(Expense()), Expense(tokens=7))
        await day.refund_unused_calls()
        assert await store.spending.spent_today("mine") == Expense(tokens=7)
