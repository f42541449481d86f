"""Compaction of the history of a run whose model has a small context window."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.budgets import DailyBudget
from policies.limits import Limits, StopReason
from policies.profile import AgentSettings, Profile
from policies.prompts import FINAL_ANSWER, SUMMARY_REQUEST
from policies.sessions import Session, SessionState
from proxy.agent.events import Event, ToolCallFinished
from proxy.agent.suspension import SuspendedRun
from proxy.errors import ContextOverflowError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.store.store import Store
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.small_window import SmallWindow, tokens
from tests.proxy.agent.runs import LOOKUP, SUBMIT, USER, Events, Run, bash, valid

LONG = bash("seq 100001 100800")
"""5,600 characters, more than a third of the context."""
RAMBLING = tool_reply(bash("true"), content="I think. " * 300)


class Steps:
    """Plays replies one after the other, and sums up when asked to."""

    def __init__(
        self, replies: Sequence[Mapping[str, Any]], summary: str = "So far so good."
    ) -> None:
        self._replies = iter(replies)
        self._summary = summary
        self.summed_up: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> Mapping[str, Any]:
        if str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40]):
            self.summed_up.append(body)
            return text_reply(self._summary)
        if FINAL_ANSWER in str(body["messages"][-1]["content"]):
            return text_reply("It is 42.")
        return next(self._replies)


@asynccontextmanager
async def served(play: SmallWindow, listed: int | None = 4096) -> AsyncIterator[OpenAIHTTPModel]:
    with anyio.fail_after(30):
        async with scripted_backend(play, model="m", window=listed) as backend:
            model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
            try:
                yield model
            finally:
                await model.aclose()


def contents(body: Mapping[str, Any], role: str) -> list[Any]:
    return [each["content"] for each in body["messages"] if each["role"] == role]


async def test_old_observations_go_first_and_what_is_unread_stays_if_it_fits() -> None:
    play = SmallWindow(Steps([tool_reply(bash("seq 100001 100500")), tool_reply(LONG), SUBMIT]))
    async with served(play) as model:
        result = await Run(model).go()
    old, unread = contents(play.bodies[2], "tool")
    assert "left out to fit the context window" in old
    assert unread.endswith("100800")
    assert len(unread) > 5000
    assert [each.kind for each in result.compactions] == ["stubs"]
    assert play.refused == 0


async def test_stub_names_the_file_and_shows_both_ends() -> None:
    sandboxes = MemorySandboxes()
    play = SmallWindow(Steps([tool_reply(bash("seq 100001 101900")), SUBMIT]))
    kept: list[str] = []

    async def look(event: Event) -> None:
        if isinstance(event, ToolCallFinished) and event.name == "submit":
            path = "/testbed/.observations/r1-1.txt"
            kept.append((await sandboxes.leased[0].exec(f"cat {path}", timeout_s=5)).stdout)

    async with served(play) as model:
        run = Run(model, sandboxes, events=Events(look))
        await run.go()
    (stub,) = contents(play.bodies[1], "tool")
    assert stub.startswith("Exit code: 0\n[stdout]\n100001\n")
    where = "all 1902 lines are in /testbed/.observations/r1-1.txt: search it"
    assert where in stub
    assert stub.endswith("\n101900")
    assert kept == [run.events.observations[0]]
    assert run.events.files == []


async def test_where_the_sandbox_is_lost_a_stub_says_to_run_the_command_again() -> None:
    sandboxes = MemorySandboxes()

    async def lose(event: Event) -> None:
        if isinstance(event, ToolCallFinished) and event.step == 1:
            await sandboxes.leased[0].close()

    again = tool_reply(bash("seq 100001 101900"))
    play = SmallWindow(Steps([again, again, again, SUBMIT]))
    async with served(play) as model:
        result = await Run(model, sandboxes, events=Events(lose)).go()
    first, lost, third = contents(play.bodies[3], "tool")
    assert "run the command again if you need them" in first
    assert "Everything in the sandbox is lost" in lost
    assert "/testbed/.observations/r1-" in third
    assert (result.answer, play.refused) == ("42", 0)


async def test_summary_takes_the_place_of_what_stubs_cannot_shorten() -> None:
    steps = Steps([RAMBLING] * 8 + [SUBMIT], "I have thought.")
    play = SmallWindow(steps)
    async with served(play) as model:
        result = await Run(model).go()
    assert (result.answer, play.refused) == ("42", 0)
    assert "summary" in {each.kind for each in result.compactions}
    assert all("tools" not in body for body in steps.summed_up)
    assert all(valid(body) for body in play.bodies)
    after = play.bodies[play.bodies.index(steps.summed_up[0]) + 1]
    roles = [each["role"] for each in after["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert after["messages"][3]["content"].startswith("[Your own summary of the work so far.")
    assert after["messages"][3]["content"].endswith("I have thought.")


@pytest.mark.parametrize("second", [RAMBLING, text_reply("I think. " * 300 + "Let me look:")])
async def test_roles_alternate_whatever_a_summary_follows_or_precedes(
    second: Mapping[str, Any],
) -> None:
    play = SmallWindow(Steps([RAMBLING, second] * 15 + [SUBMIT] * 3))
    async with served(play) as model:
        result = await Run(model, limits=Limits(max_turns=9)).go()
    assert "summary" in {each.kind for each in result.compactions}
    asked = [body for body in play.bodies if SUMMARY_REQUEST[:40] not in str(body["messages"][-1])]
    roles = [[each["role"] for each in body["messages"]] for body in asked]
    assert all(one != two for row in roles for one, two in pairwise(row))


THOUGHT = "Where was I? " * 2000


@pytest.mark.parametrize(
    "summary",
    [f"<think>{THOUGHT}</think>\n\nI know 6 x 7.", f"{THOUGHT}</think>I know 6 x 7."],
)
async def test_summary_contains_no_reasoning(summary: str) -> None:
    play = SmallWindow(Steps([RAMBLING] * 8 + [SUBMIT], summary))
    async with served(play) as model:
        await Run(model).go()
    told = [text for body in play.bodies for text in contents(body, "user")]
    summaries = {text for text in told if text.startswith("[Your own summary")}
    assert {text.partition("\n")[2] for text in summaries} == {"I know 6 x 7."}


async def test_failed_summary_is_requested_again() -> None:
    steps = Steps([RAMBLING] * 12 + [SUBMIT])
    failures = iter([Refusal(400, "not now")])

    def play(body: dict[str, Any]) -> Item:
        is_asked = str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40])
        failed = next(failures, None) if is_asked else None
        return failed or small(body)

    small = SmallWindow(steps)
    with anyio.fail_after(30):
        async with scripted_backend(play, model="m", window=4096) as backend:
            model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
            result = await Run(model).go()
            await model.aclose()
    assert next(failures, None) is None
    assert result.answer == "42"
    assert "summary" in {each.kind for each in result.compactions}


async def test_summary_call_counts_towards_the_budget() -> None:
    play = SmallWindow(Steps([RAMBLING] * 8 + [SUBMIT]))
    async with served(play) as model:
        result = await Run(model).go()
    assert result.usage["prompt_tokens"] == sum(
        tokens([body["messages"], body.get("tools")]) for body in play.bodies
    )
    assert result.stats.llm_calls == len(play.bodies)


async def test_too_long_conversation_is_summarized_from_a_transcript() -> None:
    giant = tool_reply(
        call("str_replace_editor", command="create", path="/testbed/a", file_text="x" * 12_000)
    )
    steps = Steps([tool_reply(bash("echo first")), RAMBLING, giant, SUBMIT])
    play = SmallWindow(steps)
    async with served(play) as model:
        result = await Run(model).go()
    assert result.answer == "42"
    (summed_up,) = steps.summed_up
    assert [each["role"] for each in summed_up["messages"]] == ["system", "user", "user", "user"]
    told = summed_up["messages"][2]["content"]
    assert all(each in told for each in ("echo first", "I think.", "str_replace_editor", "[...]"))


@pytest.mark.parametrize(
    "summary", ["", "<think>I think", "x" * 100_000], ids=["none", "thoughts", "an endless one"]
)
async def test_without_a_summary_the_best_answer_is_returned(summary: str) -> None:
    found = tool_reply(bash("echo 42 > output/answer.txt"))
    play = SmallWindow(Steps([found] + [RAMBLING] * 8 + [SUBMIT] * 9, summary))
    async with served(play) as model:
        result = await Run(model).go()
    assert "42" in result.answer
    if not summary.startswith("x"):
        assert (result.answer, result.stop_reason) == ("It is 42.", StopReason.CONTEXT_WINDOW)


@pytest.mark.parametrize("listed", [4096, None])
async def test_too_long_client_request_is_reported_to_the_client(listed: int | None) -> None:
    play = SmallWindow(Steps([SUBMIT]))
    async with served(play, listed) as model:
        with pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
            await Run(model).go(messages=[{"role": "user", "content": "x" * 20_000}])
    assert (play.refused, play.bodies) == (2, [])  # with our words and tools, and without


@pytest.mark.parametrize("listed", [4096, None])
async def test_client_token_limit_is_lowered_to_fit_the_window(listed: int | None) -> None:
    play = SmallWindow(
        Steps([tool_reply(bash("seq 100001 100700")), SUBMIT, text_reply("It is 42.")])
    )
    async with served(play, listed) as model:
        budget = {"max_tokens": 4000}
        result = await Run(model).go(final={"logit_bias": {"1": 1}}, token_limits=budget)
    last = play.bodies[-1]
    assert result.answer == "It is 42."
    assert 256 <= last["max_tokens"] < 4000
    assert play.refused <= 2  # the first had room for thinking beyond the budget


async def test_client_token_limit_that_fits_is_unchanged() -> None:
    play = SmallWindow(Steps([tool_reply(bash("echo 42")), SUBMIT]))
    async with served(play) as model:
        limits = Limits(min_turn_tokens=50)
        await Run(model, limits=limits).go(token_limits={"max_tokens": 100})
    assert play.bodies[-1]["max_tokens"] == 100


async def test_configured_window_takes_precedence() -> None:
    play = SmallWindow(Steps([tool_reply(LONG), SUBMIT]), window=1_000_000)
    async with served(play, 1_000_000) as model:
        run = Run(model, window=2048)
        result = await run.go()
    assert [each.cause for each in result.compactions] == ["nearly full"]


async def test_client_tool_results_are_summarized_but_never_stubbed() -> None:
    given = [f"{n}: {'g' * 2000}" for n in range(9)]
    lookups = [tool_reply(bash("seq 100001 100300"), call("lookup", key=str(n))) for n in range(9)]
    play = SmallWindow(Steps([*lookups, SUBMIT]))
    parks = SessionState(Session("somebody", "run:r1"), "parked")
    async with served(play) as model:
        run = Run(model)
        result = await run.go(client_tools=[LOOKUP], suspend_as=parks)
        for n, content in enumerate(given):
            assert result.suspended_run
            waiting = SuspendedRun.from_json(json.loads(json.dumps(result.suspended_run.to_json())))
            told = {"role": "tool", "tool_call_id": result.tool_calls[0]["id"], "content": content}
            result = await run.go(
                run_id=f"r{n + 2}",
                messages=[USER, {"role": "assistant", "tool_calls": result.tool_calls}, told],
                client_tools=[LOOKUP],
                suspend_as=replace(parks, name=f"p{n}"),
                suspended_run=waiting,
            )
            shown = contents(play.bodies[-1], "tool")
            assert shown[-1] == content
            assert all(each in given or each.startswith("Exit code") for each in shown)
    assert result.answer == "42"
    assert all(valid(body) and body["messages"][1] == USER for body in play.bodies)
    assert any(len(contents(body, "user")) == 2 for body in play.bodies)


async def test_token_limit_applies_to_summaries() -> None:
    play = SmallWindow(Steps([RAMBLING] * 30 + [SUBMIT] * 3))
    async with served(play) as model:
        result = await Run(model, limits=Limits(max_total_tokens=12_000)).go()
    assert result.stop_reason is StopReason.TOKEN_BUDGET


async def until_summary() -> tuple[int, int, int]:
    """Return the number of calls before the first summary, their cost, and the last prompt."""
    steps = Steps([RAMBLING] * 30)
    play = SmallWindow(steps)
    async with served(play) as model:
        result = await Run(model, limits=Limits(max_turns=9)).go()
    before = result.usages[: play.bodies.index(steps.summed_up[0])]
    cost = sum(each["total_tokens"] for each in before)
    # What a run is told of its limits differs by a few tokens.
    return len(before), cost + 100, before[-1]["prompt_tokens"]


@pytest.mark.parametrize("bounded", ["run", "day"])
async def test_summary_beyond_the_budget_is_not_requested(tmp_path: Path, bounded: str) -> None:
    count, cost, prompt = await until_summary()
    limits = Limits(max_total_tokens=cost + prompt if bounded == "run" else None)
    play = SmallWindow(Steps([RAMBLING] * 30))
    with closing(Store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(tokens=cost))
        async with served(play) as model:
            run = Run(model, limits=limits)
            result = await run.go(account=account if bounded == "day" else None)
    assert "tools" in play.bodies[count]
    assert result.stop_reason in (StopReason.TOKEN_BUDGET, StopReason.DAILY_TOKEN_BUDGET)


async def test_daily_budget_is_charged_for_summaries(tmp_path: Path) -> None:
    steps = Steps([RAMBLING] * 12 + [SUBMIT])
    with closing(Store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(tokens=1_000_000))
        async with served(SmallWindow(steps)) as model:
            result = await Run(model).go(account=account)
        spent = await store.spending.spent("mine")
    assert len(steps.summed_up) > 0
    assert spent.tokens == sum(each["total_tokens"] for each in result.usages)


async def test_new_observations_count_although_stubs_shorten_the_prompt() -> None:
    play = SmallWindow(Steps([tool_reply(bash("seq 100001 100500")), tool_reply(LONG), SUBMIT]))
    async with served(play) as model:
        result = await Run(model).go()
    assert [each.kind for each in result.compactions] == ["stubs"]
    told = tokens("x" * 3500) + tokens("x" * 5600)
    assert told < result.stats.env_tokens < 1.5 * told
    assert result.stats.trajectory_tokens > result.stats.env_tokens


async def test_resumed_run_saves_stubbed_observations_before_its_first_command() -> None:
    replies = [
        tool_reply(LONG),
        tool_reply(call("lookup")),
        tool_reply(bash("cat /testbed/.observations/r2-1.txt")),
        SUBMIT,
    ]
    play = SmallWindow(Steps(replies))
    parks = SessionState(Session("somebody", "run:r1"), "parked")
    async with served(play) as model:
        run = Run(model)
        result = await run.go(client_tools=[LOOKUP], suspend_as=parks)
        assert result.suspended_run
        told = {"role": "tool", "tool_call_id": result.tool_calls[0]["id"], "content": "g" * 6000}
        result = await run.go(
            run_id="r2",
            messages=[USER, {"role": "assistant", "tool_calls": result.tool_calls}, told],
            client_tools=[LOOKUP],
            resume_from=result.suspended_run.resume_from,
            suspended_run=result.suspended_run,
        )
    stub, given = contents(play.bodies[2], "tool")
    assert "are in /testbed/.observations/r2-1.txt" in stub
    assert given == told["content"]
    assert "100800" in run.events.observations[1]


async def test_reference_style_appends_the_turns_left_with_and_without_a_summary() -> None:
    play = SmallWindow(Steps([tool_reply(bash("true"), content="I think. " * 900)] * 30))
    async with served(play) as model:
        run = Run(
            model, profile=Profile(agent=AgentSettings("reference")), limits=Limits(max_turns=9)
        )
        result = await run.go()
    assert "summary" in {each.kind for each in result.compactions}
    turns = [body["messages"][-1]["content"] for body in play.bodies if "tools" in body]
    said = [text.rpartition("\n")[2] for text in turns]
    assert said == [f"Steps Remaining: {left}" for left in range(9, 0, -1)]
