"""A sandbox that is lost after the last command does not affect the answer."""

from typing import Any

import pytest

from policies.limits import Limits, StopReason
from policies.sessions import Session, SessionState
from proxy.agent.events import Event, FileProduced, ToolCallFinished
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.proxy.agent.runs import LOOKUP, SUBMIT, Events, Run, bash

MAKE_FILES = tool_reply(bash("echo 1 > output/a.csv; echo 2 > output/b.csv"))


def run_with_loss(replies: list[dict[str, Any]], at: type[Event], **fields: Any) -> Run:
    """Return a run whose sandbox ends at the first event of a kind."""
    sandboxes = MemorySandboxes()

    async def lose(event: Event) -> None:
        if isinstance(event, at):
            await sandboxes.leased[0].close()

    return Run(ScriptedModel(replies), sandboxes, events=Events(lose), **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("replies", "limits", "answer", "stop"),
    [
        ([SUBMIT], Limits(), "42", StopReason.SUBMITTED),
        ([text_reply("It is 42.")], Limits(), "It is 42.", StopReason.ANSWERED),
        ([text_reply("About 42.")], Limits(max_turns=1), "About 42.", StopReason.MAX_TURNS),
        ([tool_reply(call("lookup"))], Limits(), "", StopReason.CLIENT_TOOL_CALLS),
    ],
)
async def test_answer_of_a_run_with_a_lost_sandbox_is_returned_with_a_warning(
    replies: list[dict[str, Any]], limits: Limits, answer: str, stop: StopReason, stream: bool
) -> None:
    run = run_with_loss([MAKE_FILES, *replies], ToolCallFinished, limits=limits)
    state = SessionState(Session("somebody", "run:r1"), "kept")
    result = await run.go(stream=stream, client_tools=[LOOKUP], save_as=state)
    assert (result.answer, result.stop_reason) == (answer, stop)
    assert [each.code for each in result.warnings] == ["sandbox_lost"]
    assert (result.artifacts, result.skipped_files) == ((), ())


async def test_files_saved_before_the_sandbox_was_lost_are_artifacts() -> None:
    result = await run_with_loss([MAKE_FILES, SUBMIT], FileProduced).go()
    assert [each.path for each in result.artifacts] == ["/testbed/output/a.csv"]
    assert [(each.path, each.why) for each in result.skipped_files] == [
        ("/testbed/output/b.csv", "lost")
    ]
    assert [each.code for each in result.warnings] == ["sandbox_lost"]
