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
from proxy.agent.suspended_run import SuspendedRun
from proxy.errors import ContextOverflowError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.small_window import SmallWindow, tokens
from tests.proxy.agent.runs import LOOKUP, SUBMIT, USER, Events, Run, bash, valid
from tests.stores import open_store

LONG = bash("seq 100001 100800")
"""5,600 characters, more than a third of the context."""
RAMBLING = tool_reply(bash("true"), content="I think. " * 300)


class ReplyScript:
    """A script that returns its replies in order, and a summary for each summary request."""

    def __init__(
        self, replies: Sequence[Mapping[str, Any]], summary: str = "So far so good."
    ) -> None:
        self._replies = iter(replies)
        self._summary = summary
        self.summary_requests: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> Mapping[str, Any]:
        if str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40]):
            self.summary_requests.append(body)
            return text_reply(self._summary)
        if FINAL_ANSWER in str(body["messages"][-1]["content"]):
            return text_reply("It is 42.")
        return next(self._replies)


@asynccontextmanager
async def small_window_model(
    script: SmallWindow, listed_window: int | None = 4096
) -> AsyncIterator[OpenAIHTTPModel]:
    with anyio.fail_after(30):
        async with scripted_backend(script, model="m", window=listed_window) as backend:
            model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
            try:
                yield model
            finally:
                await model.aclose()


def contents(body: Mapping[str, Any], role: str) -> list[Any]:
    return [each["content"] for each in body["messages"] if each["role"] == role]


async def test_old_observations_are_stubbed_before_unread_ones() -> None:
    script = SmallWindow(
        ReplyScript([tool_reply(bash("seq 100001 100500")), tool_reply(LONG), SUBMIT])
    )
    async with small_window_model(script) as model:
        result = await Run(model).go()
    old, unread = contents(script.bodies[2], "tool")
    assert "left out to fit the context window" in old
    assert unread.endswith("100800")
    assert len(unread) > 5000
    assert [each.kind for each in result.compactions] == ["stubs"]
    assert script.refused == 0


async def test_stub_names_the_saved_file_and_shows_both_ends_of_the_observation() -> None:
    sandboxes = MemorySandboxes()
    script = SmallWindow(ReplyScript([tool_reply(bash("seq 100001 101900")), SUBMIT]))
    saved: list[str] = []

    async def look(event: Event) -> None:
        if isinstance(event, ToolCallFinished) and event.name == "submit":
            path = "/testbed/.observations/r1-1.txt"
            saved.append((await sandboxes.leased[0].exec(f"cat {path}", timeout_s=5)).stdout)

    async with small_window_model(script) as model:
        run = Run(model, sandboxes, events=Events(look))
        await run.go()
    (stub,) = contents(script.bodies[1], "tool")
    assert stub.startswith("Exit code: 0\n[stdout]\n100001\n")
    file_hint = "all 1902 lines are in /testbed/.observations/r1-1.txt: search it"
    assert file_hint in stub
    assert stub.endswith("\n101900")
    assert saved == [run.events.observations[0]]
    assert run.events.files == []


async def test_stub_after_the_loss_of_the_sandbox_says_to_repeat_the_command() -> None:
    sandboxes = MemorySandboxes()

    async def lose(event: Event) -> None:
        if isinstance(event, ToolCallFinished) and event.step == 1:
            await sandboxes.leased[0].close()

    again = tool_reply(bash("seq 100001 101900"))
    script = SmallWindow(ReplyScript([again, again, again, SUBMIT]))
    async with small_window_model(script) as model:
        result = await Run(model, sandboxes, events=Events(lose)).go()
    first, lost, third = contents(script.bodies[3], "tool")
    assert "run the command again if you need them" in first
    assert "Everything in the sandbox is lost" in lost
    assert "/testbed/.observations/r1-" in third
    assert (result.answer, script.refused) == ("42", 0)


async def test_summary_replaces_messages_that_stubs_cannot_shorten() -> None:
    reply_script = ReplyScript([RAMBLING] * 8 + [SUBMIT], "I have thought.")
    script = SmallWindow(reply_script)
    async with small_window_model(script) as model:
        result = await Run(model).go()
    assert (result.answer, script.refused) == ("42", 0)
    assert "summary" in {each.kind for each in result.compactions}
    assert all("tools" not in body for body in reply_script.summary_requests)
    assert all(valid(body) for body in script.bodies)
    after = script.bodies[script.bodies.index(reply_script.summary_requests[0]) + 1]
    roles = [each["role"] for each in after["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert after["messages"][3]["content"].startswith("[Your own summary of the work so far.")
    assert after["messages"][3]["content"].endswith("I have thought.")


@pytest.mark.parametrize("second", [RAMBLING, text_reply("I think. " * 300 + "Let me look:")])
async def test_roles_alternate_before_and_after_a_summary(
    second: Mapping[str, Any],
) -> None:
    script = SmallWindow(ReplyScript([RAMBLING, second] * 15 + [SUBMIT] * 3))
    async with small_window_model(script) as model:
        result = await Run(model, limits=Limits(max_turns=9)).go()
    assert "summary" in {each.kind for each in result.compactions}
    requests = [
        body for body in script.bodies if SUMMARY_REQUEST[:40] not in str(body["messages"][-1])
    ]
    roles = [[each["role"] for each in body["messages"]] for body in requests]
    assert all(earlier != later for row in roles for earlier, later in pairwise(row))


THOUGHT = "Where was I? " * 2000


@pytest.mark.parametrize(
    "summary",
    [f"<think>{THOUGHT}</think>\n\nI know 6 x 7.", f"{THOUGHT}</think>I know 6 x 7."],
)
async def test_summary_contains_no_reasoning(summary: str) -> None:
    script = SmallWindow(ReplyScript([RAMBLING] * 8 + [SUBMIT], summary))
    async with small_window_model(script) as model:
        await Run(model).go()
    user_texts = [text for body in script.bodies for text in contents(body, "user")]
    summaries = {text for text in user_texts if text.startswith("[Your own summary")}
    assert {text.partition("\n")[2] for text in summaries} == {"I know 6 x 7."}


async def test_failed_summary_call_is_repeated_at_the_next_overflow() -> None:
    reply_script = ReplyScript([RAMBLING] * 12 + [SUBMIT])
    failures = iter([Refusal(400, "not now")])

    def script(body: dict[str, Any]) -> Item:
        is_summary_request = str(body["messages"][-1]["content"]).startswith(SUMMARY_REQUEST[:40])
        failed = next(failures, None) if is_summary_request else None
        return failed or small_window(body)

    small_window = SmallWindow(reply_script)
    with anyio.fail_after(30):
        async with scripted_backend(script, model="m", window=4096) as backend:
            model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
            result = await Run(model).go()
            await model.aclose()
    assert next(failures, None) is None
    assert result.answer == "42"
    assert "summary" in {each.kind for each in result.compactions}


async def test_summary_call_counts_towards_the_budget() -> None:
    script = SmallWindow(ReplyScript([RAMBLING] * 8 + [SUBMIT]))
    async with small_window_model(script) as model:
        result = await Run(model).go()
    assert result.usage["prompt_tokens"] == sum(
        tokens([body["messages"], body.get("tools")]) for body in script.bodies
    )
    assert result.stats.llm_calls == len(script.bodies)


async def test_too_long_conversation_is_summarized_from_a_transcript() -> None:
    giant = tool_reply(
        call("str_replace_editor", command="create", path="/testbed/a", file_text="x" * 12_000)
    )
    reply_script = ReplyScript([tool_reply(bash("echo first")), RAMBLING, giant, SUBMIT])
    script = SmallWindow(reply_script)
    async with small_window_model(script) as model:
        result = await Run(model).go()
    assert result.answer == "42"
    (summary_request,) = reply_script.summary_requests
    assert [each["role"] for each in summary_request["messages"]] == [
        "system",
        "user",
        "user",
        "user",
    ]
    transcript = summary_request["messages"][2]["content"]
    assert all(
        each in transcript for each in ("echo first", "I think.", "str_replace_editor", "[...]")
    )


@pytest.mark.parametrize(
    "summary", ["", "<think>I think", "x" * 100_000], ids=["empty", "only reasoning", "endless"]
)
async def test_best_answer_is_returned_if_the_model_writes_no_usable_summary(summary: str) -> None:
    write_answer = tool_reply(bash("echo 42 > output/answer.txt"))
    script = SmallWindow(ReplyScript([write_answer] + [RAMBLING] * 8 + [SUBMIT] * 9, summary))
    async with small_window_model(script) as model:
        result = await Run(model).go()
    assert "42" in result.answer
    if not summary.startswith("x"):
        assert (result.answer, result.stop_reason) == ("It is 42.", StopReason.CONTEXT_WINDOW)


@pytest.mark.parametrize("listed_window", [4096, None])
async def test_client_request_that_exceeds_the_window_is_reported_to_the_client(
    listed_window: int | None,
) -> None:
    script = SmallWindow(ReplyScript([SUBMIT]))
    async with small_window_model(script, listed_window) as model:
        with pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
            await Run(model).go(messages=[{"role": "user", "content": "x" * 20_000}])
    # One request with the proxy's prompt and tools, and one without.
    assert (script.refused, script.bodies) == (2, [])


@pytest.mark.parametrize("listed_window", [4096, None])
async def test_client_token_limit_is_lowered_to_fit_the_window(listed_window: int | None) -> None:
    script = SmallWindow(
        ReplyScript([tool_reply(bash("seq 100001 100700")), SUBMIT, text_reply("It is 42.")])
    )
    async with small_window_model(script, listed_window) as model:
        budget = {"max_tokens": 4000}
        result = await Run(model).go(final={"logit_bias": {"1": 1}}, token_limits=budget)
    last = script.bodies[-1]
    assert result.answer == "It is 42."
    assert 256 <= last["max_tokens"] < 4000
    # The first requests leave room for reasoning beyond the client's limit.
    assert script.refused <= 2


async def test_client_token_limit_that_fits_is_unchanged() -> None:
    script = SmallWindow(ReplyScript([tool_reply(bash("echo 42")), SUBMIT]))
    async with small_window_model(script) as model:
        limits = Limits(min_turn_tokens=50)
        await Run(model, limits=limits).go(token_limits={"max_tokens": 100})
    assert script.bodies[-1]["max_tokens"] == 100


async def test_configured_context_window_takes_precedence_over_that_of_the_server() -> None:
    script = SmallWindow(ReplyScript([tool_reply(LONG), SUBMIT]), window=1_000_000)
    async with small_window_model(script, 1_000_000) as model:
        run = Run(model, window=2048)
        result = await run.go()
    assert [each.cause for each in result.compactions] == ["nearly full"]


async def test_client_tool_results_are_summarized_but_never_stubbed() -> None:
    tool_contents = [f"{n}: {'g' * 2000}" for n in range(9)]
    lookups = [tool_reply(bash("seq 100001 100300"), call("lookup", key=str(n))) for n in range(9)]
    script = SmallWindow(ReplyScript([*lookups, SUBMIT]))
    suspend_as = SessionState(Session("somebody", "run:r1"), "parked")
    async with small_window_model(script) as model:
        run = Run(model)
        result = await run.go(client_tools=[LOOKUP], suspend_as=suspend_as)
        for n, content in enumerate(tool_contents):
            assert result.suspended_run
            suspended_run = SuspendedRun.from_json(
                json.loads(json.dumps(result.suspended_run.to_json()))
            )
            tool_result = {
                "role": "tool",
                "tool_call_id": result.client_calls[0]["id"],
                "content": content,
            }
            result = await run.go(
                run_id=f"r{n + 2}",
                messages=[
                    USER,
                    {"role": "assistant", "tool_calls": result.client_calls},
                    tool_result,
                ],
                client_tools=[LOOKUP],
                suspend_as=replace(suspend_as, name=f"p{n}"),
                suspended_run=suspended_run,
            )
            shown = contents(script.bodies[-1], "tool")
            assert shown[-1] == content
            assert all(each in tool_contents or each.startswith("Exit code") for each in shown)
    assert result.answer == "42"
    assert all(valid(body) and body["messages"][1] == USER for body in script.bodies)
    assert any(len(contents(body, "user")) == 2 for body in script.bodies)


async def test_token_limit_applies_to_summaries() -> None:
    script = SmallWindow(ReplyScript([RAMBLING] * 30 + [SUBMIT] * 3))
    async with small_window_model(script) as model:
        result = await Run(model, limits=Limits(max_total_tokens=12_000)).go()
    assert result.stop_reason is StopReason.TOKEN_BUDGET


async def until_summary() -> tuple[int, int, int]:
    """Return the number of calls before the first summary, their cost, and the last prompt."""
    reply_script = ReplyScript([RAMBLING] * 30)
    script = SmallWindow(reply_script)
    async with small_window_model(script) as model:
        result = await Run(model, limits=Limits(max_turns=9)).go()
    before = result.usages[: script.bodies.index(reply_script.summary_requests[0])]
    cost = sum(each["total_tokens"] for each in before)
    # The reminders of the limits differ by a few tokens.
    return len(before), cost + 100, before[-1]["prompt_tokens"]


@pytest.mark.parametrize("limited", ["run", "day"])
async def test_summary_beyond_the_budget_is_not_requested(tmp_path: Path, limited: str) -> None:
    count, cost, prompt = await until_summary()
    limits = Limits(max_total_tokens=cost + prompt if limited == "run" else None)
    script = SmallWindow(ReplyScript([RAMBLING] * 30))
    with closing(open_store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(tokens=cost))
        async with small_window_model(script) as model:
            run = Run(model, limits=limits)
            result = await run.go(account=account if limited == "day" else None)
    assert "tools" in script.bodies[count]
    assert result.stop_reason in (StopReason.TOKEN_BUDGET, StopReason.DAILY_TOKEN_BUDGET)


async def test_daily_budget_is_charged_for_summaries(tmp_path: Path) -> None:
    reply_script = ReplyScript([RAMBLING] * 12 + [SUBMIT])
    with closing(open_store(tmp_path)) as store:
        account = store.spending.account("mine", DailyBudget(tokens=1_000_000))
        async with small_window_model(SmallWindow(reply_script)) as model:
            result = await Run(model).go(account=account)
        spent = await store.spending.spent_today("mine")
    assert len(reply_script.summary_requests) > 0
    assert spent.tokens == sum(each["total_tokens"] for each in result.usages)


async def test_new_observations_count_as_env_tokens_although_stubs_shorten_the_prompt() -> None:
    script = SmallWindow(
        ReplyScript([tool_reply(bash("seq 100001 100500")), tool_reply(LONG), SUBMIT])
    )
    async with small_window_model(script) as model:
        result = await Run(model).go()
    assert [each.kind for each in result.compactions] == ["stubs"]
    estimate = tokens("x" * 3500) + tokens("x" * 5600)
    assert estimate < result.stats.env_tokens < 1.5 * estimate
    assert result.stats.trajectory_tokens > result.stats.env_tokens


async def test_resumed_run_saves_stubbed_observations_before_its_first_command() -> None:
    replies = [
        tool_reply(LONG),
        tool_reply(call("lookup")),
        tool_reply(bash("cat /testbed/.observations/r2-1.txt")),
        SUBMIT,
    ]
    script = SmallWindow(ReplyScript(replies))
    suspend_as = SessionState(Session("somebody", "run:r1"), "parked")
    async with small_window_model(script) as model:
        run = Run(model)
        result = await run.go(client_tools=[LOOKUP], suspend_as=suspend_as)
        assert result.suspended_run
        tool_result = {
            "role": "tool",
            "tool_call_id": result.client_calls[0]["id"],
            "content": "g" * 6000,
        }
        result = await run.go(
            run_id="r2",
            messages=[USER, {"role": "assistant", "tool_calls": result.client_calls}, tool_result],
            client_tools=[LOOKUP],
            resume_from=result.suspended_run.resume_from,
            suspended_run=result.suspended_run,
        )
    stub, result_content = contents(script.bodies[2], "tool")
    assert "are in /testbed/.observations/r2-1.txt" in stub
    assert result_content == tool_result["content"]
    assert "100800" in run.events.observations[1]


async def test_reference_style_states_the_remaining_turns_even_after_a_summary() -> None:
    script = SmallWindow(ReplyScript([tool_reply(bash("true"), content="I think. " * 900)] * 30))
    async with small_window_model(script) as model:
        run = Run(
            model, profile=Profile(agent=AgentSettings("reference")), limits=Limits(max_turns=9)
        )
        result = await run.go()
    assert "summary" in {each.kind for each in result.compactions}
    turns = [body["messages"][-1]["content"] for body in script.bodies if "tools" in body]
    last_lines = [text.rpartition("\n")[2] for text in turns]
    assert last_lines == [f"Steps Remaining: {left}" for left in range(9, 0, -1)]
