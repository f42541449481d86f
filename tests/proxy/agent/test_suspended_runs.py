"""Suspended runs resume with the client's tool results."""

import json
from dataclasses import replace
from typing import Any

import pytest

from policies.limits import Limits, StopReason
from policies.sessions import ResumePoint, Session, SessionState
from proxy.agent.loop import MAX_KEPT_ANSWER_CHARS
from proxy.agent.result import Result
from proxy.agent.suspended_run import SuspendedRun
from proxy.agent.suspension import NO_RESULT, answered_run_keys, resumed_history
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.proxy.agent.runs import LOOKUP, SUBMIT, USER, MemoryArtifactStore, Run, bash, valid

SUSPENDED_STATE = SessionState(Session("somebody", "run:r1"), "parked")
SUNNY = {"type": "text", "text": "sunny"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
MIXED = tool_reply(bash("echo kept > file; echo shown > output/shown"), call("lookup", key="x"))


def tool_result(id: str, content: Any = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def assistant_message(result: Result) -> dict[str, Any]:
    """Return the assistant message of a suspended run as the client sends it back."""
    return {"role": "assistant", "content": None, "tool_calls": list(result.client_calls)}


async def suspended_run(run: Run, **fields: Any) -> tuple[Result, SuspendedRun]:
    result = await run.go(client_tools=[LOOKUP], suspend_as=SUSPENDED_STATE, **fields)
    assert result.suspended_run
    return result, SuspendedRun.from_json(result.suspended_run.to_json())


async def test_client_tool_results_are_appended_to_the_history() -> None:
    model = ScriptedModel([MIXED, tool_reply(bash("cat file")), SUBMIT])
    run = Run(model)
    first, suspended = await suspended_run(run)
    messages = [USER, assistant_message(first), tool_result("call_r1_1")]
    second = await run.go(
        run_id="r2",
        messages=messages,
        client_tools=[LOOKUP],
        resume_from=suspended.resume_from,
        suspended_run=suspended,
    )
    before, after = model.requests[0]["messages"], model.requests[1]["messages"]
    assert after[: len(before)] == before
    assert [message["role"] for message in after[len(before) :]] == ["assistant", "tool", "tool"]
    model_call_id = after[len(before)]["tool_calls"][1]["id"]
    assert after[-1] == {"role": "tool", "tool_call_id": model_call_id, "content": "sunny"}
    assert all(valid(body) for body in model.requests)
    assert run.events.observations[1] == "Exit code: 0\n[stdout]\nkept"
    assert (second.answer, second.stop_reason) == ("42", StopReason.SUBMITTED)
    assert [artifact.path for artifact in first.artifacts] == ["/testbed/output/shown"]
    assert second.artifacts == []  # the client has it


async def test_resumed_run_uses_its_stored_messages_if_the_client_has_edited_or_dropped_them() -> (
    None
):
    model = ScriptedModel([MIXED, SUBMIT])
    run = Run(model)
    _, suspended = await suspended_run(run)
    messages = [{"role": "user", "content": "edited"}, tool_result("call_r1_1")]
    await run.go(messages=messages, client_tools=[LOOKUP], suspended_run=suspended)
    sent = model.requests[1]["messages"]
    assert [message["content"] for message in sent if message["role"] == "user"] == [
        USER["content"]
    ]
    assert sent[-1]["content"] == "sunny"


async def test_instructions_with_tool_results_replace_earlier_instructions() -> None:
    model = ScriptedModel([MIXED, SUBMIT])
    run = Run(model)
    first = [{"role": "system", "content": "You are the first."}, USER]
    result, suspended = await suspended_run(run, messages=first)
    second = [{"role": role, "content": f"Be {role}."} for role in ("system", "developer")]
    messages = [*second, USER, assistant_message(result), tool_result("call_r1_1")]
    await run.go(messages=messages, client_tools=[LOOKUP], suspended_run=suspended)
    before, after = model.requests[0]["messages"], model.requests[1]["messages"]
    assert after[0]["content"] == before[0]["content"].replace("You are the first.", "Be system.")
    assert after[1:3] == [second[1], USER]
    history = resumed_history(suspended, messages, after[:2])
    assert history.run_start_index == suspended.run_start_index + 1


async def test_messages_after_tool_results_are_kept() -> None:
    model = ScriptedModel([MIXED, SUBMIT])
    run = Run(model)
    first, suspended = await suspended_run(run)
    more = {"role": "user", "content": "And hurry."}
    messages = [USER, assistant_message(first), tool_result("call_r1_1"), more]
    await run.go(messages=messages, client_tools=[LOOKUP], suspended_run=suspended)
    assert model.requests[1]["messages"][-2:] == [
        {"role": "tool", "tool_call_id": "call_0_1", "content": "sunny"},
        more,
    ]


async def test_unanswered_client_tool_call_gets_a_default_result() -> None:
    model = ScriptedModel([tool_reply(call("lookup", key="x"), call("lookup", key="y")), SUBMIT])
    run = Run(model)
    first, suspended = await suspended_run(run)
    messages = [USER, assistant_message(first), tool_result("call_r1_2")]
    await run.go(messages=messages, client_tools=[LOOKUP], suspended_run=suspended)
    sent = [m["content"] for m in model.requests[1]["messages"] if m["role"] == "tool"]
    assert sent == [NO_RESULT, "sunny"]
    assert valid(model.requests[1])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("sunny", "Result of lookup:\nsunny"),
        ([SUNNY, ", warm"], "Result of lookup:\nsunny, warm"),
        ([SUNNY, PICTURE], [{"type": "text", "text": "Result of lookup:\nsunny"}, PICTURE]),
        (None, "Result of lookup:\n"),
    ],
)
async def test_result_of_a_client_tool_call_written_as_text_is_sent_as_a_user_message(
    content: Any, expected: Any
) -> None:
    text = '<tool_call>{"name": "lookup", "arguments": {"key": "x"}}</tool_call>'
    model = ScriptedModel([text_reply(text), SUBMIT])
    run = Run(model)
    first, suspended = await suspended_run(run)
    answer = tool_result("call_r1_1", content)
    await run.go(
        messages=[USER, assistant_message(first), answer],
        client_tools=[LOOKUP],
        suspended_run=suspended,
    )
    assert model.requests[1]["messages"][-1] == {"role": "user", "content": expected}


async def test_tool_result_without_content_is_sent_with_an_empty_string() -> None:
    model = ScriptedModel([tool_reply(call("lookup", key="x")), SUBMIT])
    run = Run(model)
    first, suspended = await suspended_run(run)
    answer = tool_result("call_r1_1", None)
    await run.go(
        messages=[USER, assistant_message(first), answer],
        client_tools=[LOOKUP],
        suspended_run=suspended,
    )
    assert model.requests[1]["messages"][-1]["content"] == ""


async def resume(run: Run, first: Result, suspended: SuspendedRun, **fields: Any) -> Result:
    """Return the result of a run that resumes `suspended` with a result for its first call."""
    return await run.go(
        **{
            "run_id": "r2",
            "messages": [USER, assistant_message(first), tool_result("call_r1_1")],
            "client_tools": [LOOKUP],
            "resume_from": suspended.resume_from,
            "suspended_run": suspended,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("first_calls", "last_reply"),
    [
        ([bash("echo 41 > output/answer.txt"), call("lookup")], SUBMIT),
        ([bash("echo 41 > output/answer.txt"), call("lookup")], text_reply("42")),
        ([call("lookup")], tool_reply(call("submit"))),
    ],
    ids=["submit with an answer", "prose", "no sandbox before"],
)
async def test_resumed_run_that_needs_no_files_leases_no_sandbox(
    first_calls: list[dict[str, Any]], last_reply: dict[str, Any]
) -> None:
    sandboxes = MemorySandboxes()
    model = ScriptedModel([tool_reply(*first_calls), last_reply, text_reply("42")])
    run = Run(model, sandboxes=sandboxes)
    first, suspended = await suspended_run(run)
    opened = sandboxes.opened
    second = await resume(run, first, suspended)
    assert second.answer == "42"
    assert sandboxes.opened == opened


@pytest.mark.parametrize("suspensions", [1, 2])
async def test_resumed_run_without_a_submitted_answer_returns_the_answer_file_of_the_suspended_run(
    suspensions: int,
) -> None:
    sandboxes = MemorySandboxes()
    first_calls = tool_reply(bash("echo 41 > output/answer.txt"), call("lookup"))
    more_calls = [tool_reply(call("lookup")) for _ in range(suspensions - 1)]
    model = ScriptedModel([first_calls, *more_calls, tool_reply(call("submit"))])
    run = Run(model, sandboxes=sandboxes)
    result, suspended = await suspended_run(run)
    opened = sandboxes.opened
    for number in range(suspensions):
        suspended = SuspendedRun.from_json(json.loads(json.dumps(suspended.to_json())))
        answered = tool_result(suspended.calls[0].client_id)
        messages = [USER, assistant_message(result), answered]
        result = await resume(run, result, suspended, run_id=f"r{number + 2}", messages=messages)
        suspended = result.suspended_run or suspended
    assert result.answer == "41"
    assert sandboxes.opened == opened


async def test_answer_file_deleted_by_the_resumed_run_is_not_returned() -> None:
    sandboxes = MemorySandboxes()
    replies = [
        tool_reply(bash("echo 41 > output/answer.txt"), call("lookup")),
        tool_reply(bash("rm output/answer.txt")),
        tool_reply(call("submit")),
        text_reply("42"),
    ]
    run = Run(ScriptedModel(replies), sandboxes=sandboxes)
    first, suspended = await suspended_run(run)
    assert suspended.answer_file == "41"
    assert (await resume(run, first, suspended)).answer == "42"


async def test_long_answer_file_is_not_stored_with_a_suspended_run() -> None:
    write = f"echo {'4' * (MAX_KEPT_ANSWER_CHARS + 1)} > output/answer.txt"
    run = Run(ScriptedModel([tool_reply(bash(write), call("lookup"))]))
    _, suspended = await suspended_run(run)
    assert suspended.answer_file == ""


async def test_run_without_a_session_saves_its_files_only_if_it_is_suspended() -> None:
    run = Run(ScriptedModel([MIXED, SUBMIT, SUBMIT]))
    await suspended_run(run)
    assert run.snapshots.kept.keys() == {SUSPENDED_STATE.session}
    await run.go(
        run_id="r2", suspend_as=replace(SUSPENDED_STATE, session=Session("somebody", "run:r2"))
    )
    assert run.snapshots.kept.keys() == {SUSPENDED_STATE.session}


async def test_answer_file_of_an_earlier_run_is_ignored() -> None:
    sandboxes, snapshots = MemorySandboxes(), MemorySnapshots()
    session = Session("somebody", "chat")
    commands = [
        "echo old > output/answer.txt; echo plot > output/plot.svg; echo a > output/same",
        "echo plot 2 > output/plot.svg; cat output/same",
    ]
    replies = [
        [tool_reply(bash(commands[0])), text_reply("Done.")],
        [tool_reply(bash(commands[1])), text_reply("Here it is.")],
    ]
    results = []
    for n, script in enumerate(replies):
        run = Run(ScriptedModel(script), sandboxes=sandboxes, snapshots=snapshots)
        results.append(
            await run.go(resume_from=ResumePoint(session), save_as=SessionState(session, str(n)))
        )
    first, second = results
    assert (first.answer, first.origin) == ("old", "new")
    assert (second.answer, second.origin) == ("Here it is.", "restored")
    assert [artifact.path for artifact in second.artifacts] == ["/testbed/output/plot.svg"]


@pytest.mark.parametrize("name", ["execute_bash", "submit"])
async def test_proxy_tool_is_renamed_if_the_client_uses_its_name(name: str) -> None:
    client_tool = {**LOOKUP, "function": {"name": name, "parameters": {"type": "object"}}}
    proxy_name = {"execute_bash": "sandbox_execute_bash", "submit": "sandbox_submit"}[name]
    model = ScriptedModel(
        [tool_reply({**bash("echo 1"), "name": proxy_name}), tool_reply(call(name))]
    )
    if name == "submit":
        model = ScriptedModel([tool_reply(call(proxy_name, answer="42"))])
    run = Run(model)
    result = await run.go(client_tools=[client_tool])
    names = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert sorted(names).count(name) == 1
    assert proxy_name in names
    assert proxy_name in model.requests[0]["messages"][0]["content"]
    if name == "submit":
        assert result.answer == "42"
    else:
        assert [tool_call["function"]["name"] for tool_call in result.client_calls] == [name]
        assert run.events.observations == ["Exit code: 0\n[stdout]\n1"]


async def test_call_of_a_client_tool_named_submit_does_not_submit_an_answer() -> None:
    client_tool = {**LOOKUP, "function": {"name": "submit", "parameters": {"type": "object"}}}
    run = Run(ScriptedModel([tool_reply(call("submit", answer="theirs"))]))
    result = await run.go(client_tools=[client_tool], stream=True)
    assert (result.answer, run.events.answer) == ("", "")
    assert [tool_call["function"]["name"] for tool_call in result.client_calls] == ["submit"]


async def test_required_client_tool_call_sets_tool_choice_required_and_removes_submit() -> None:
    model = ScriptedModel([tool_reply(bash("echo 1")), tool_reply(call("lookup", key="x"))])
    result = await Run(model).go(client_tools=[LOOKUP], must_call=True)
    assert result.finish_reason == "tool_calls"
    assert [body["tool_choice"] for body in model.requests] == ["required", "required"]
    assert "submit" not in [tool["function"]["name"] for tool in model.requests[0]["tools"]]


async def test_unknown_calls_in_place_of_a_required_client_call_get_tool_results() -> None:
    unknown_calls = tool_reply(call("nonsense"), call("nonsense"))
    model = ScriptedModel([tool_reply(bash("echo 1")), unknown_calls, text_reply("It is 42.")])
    run = Run(model, limits=Limits(max_turns=1))
    result = await run.go(client_tools=[LOOKUP], must_call=True)
    assert result.answer == "It is 42."
    assert all(valid(body) for body in model.requests)


async def test_required_client_call_is_requested_when_a_limit_ends_the_run() -> None:
    model = ScriptedModel([tool_reply(bash("echo 1")), tool_reply(call("lookup", key="x"))])
    run = Run(model, limits=Limits(max_turns=1))
    result = await run.go(client_tools=[LOOKUP], must_call=True)
    assert (result.finish_reason, result.stop_reason) == (
        "tool_calls",
        StopReason.CLIENT_TOOL_CALLS,
    )
    assert (model.requests[1]["tools"], model.requests[1]["tool_choice"]) == ([LOOKUP], "required")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], []),
        ([tool_result("call_r1_1"), tool_result("call_r1_2")], ["r1"]),
        ([tool_result("call_r1_1"), tool_result("call_r2_1"), USER], ["r2", "r1"]),
        ([tool_result("call_r1_1"), {"role": "assistant", "content": "Well."}, USER], []),
        ([tool_result("toolu_1"), {"role": "tool"}, {"role": "tool", "tool_call_id": 7}], []),
    ],
)
def test_suspended_runs_are_found_by_the_ids_of_answered_calls(
    messages: list[dict[str, Any]], expected: list[str]
) -> None:
    assert answered_run_keys(messages) == expected


@pytest.mark.parametrize("is_stored", [False, True])
async def test_file_of_an_earlier_run_is_saved_again_if_the_answer_links_to_its_expired_artifact(
    is_stored: bool,
) -> None:
    sandboxes, snapshots, artifact_store = (
        MemorySandboxes(),
        MemorySnapshots(),
        MemoryArtifactStore(),
    )
    session = Session("somebody", "chat")
    make = bash("echo a > output/a.csv; echo b > output/b.csv")
    scripts = [
        [tool_reply(make), text_reply("Done.")],
        [tool_reply(bash("true")), text_reply("It is in /testbed/output/a.csv.")],
    ]
    for n, script in enumerate(scripts):
        run = Run(
            ScriptedModel(script),
            sandboxes=sandboxes,
            snapshots=snapshots,
            artifact_store=artifact_store,
        )
        result = await run.go(
            resume_from=ResumePoint(session), save_as=SessionState(session, str(n))
        )
        if not is_stored:
            artifact_store.saved.clear()
    assert result.answer == "It is in [a.csv](https://files.test/a.csv)."
    named = [] if is_stored else ["/testbed/output/a.csv"]
    assert [artifact.path for artifact in result.artifacts] == named


async def test_backend_call_id_is_replaced_by_a_proxy_id() -> None:
    reply = tool_reply({**call("lookup"), "id": "call_r1_x"})
    result, suspended = await suspended_run(Run(ScriptedModel([reply])))
    assert [tool_call["id"] for tool_call in result.client_calls] == ["call_r1_1"]
    assert suspended.calls == [("call_r1_1", "call_r1_x", "lookup")]
