"""Redaction of streamed texts, which are held back until a secret cannot continue."""

from policies.limits import StopReason
from policies.redaction import Redaction, SecretFinder
from proxy.agent.events import (
    AnswerDelta,
    Event,
    Narration,
    ReasoningDelta,
    RunFinished,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.redactor import Redactor

SECRET = "ghp_" + "q7R2" * 9
SHOWN = "[redacted github]"
FINISHED = RunFinished(StopReason.SUBMITTED)


def redacted(*events: Event) -> list[Event]:
    redactor = Redactor(SecretFinder(Redaction(("github",))))
    return [shown for event in events for shown in redactor.events(event)]


def test_reasoning_and_narration_keep_their_kind_and_precede_the_call() -> None:
    call = ToolCallStarted(1, "c", "execute_bash", {"command": f"echo {SECRET}", "n": [SECRET, 1]})
    events = (ReasoningDelta("I "), ReasoningDelta("think."), Narration("I do."), call)
    assert redacted(*events) == [
        ReasoningDelta("I think."),
        Narration("I do."),
        ToolCallStarted(1, "c", "execute_bash", {"command": f"echo {SHOWN}", "n": [SHOWN, 1]}),
    ]


def test_secret_split_across_output_pieces_is_redacted_despite_events_between() -> None:
    ended = ToolCallFinished(1, "c", "execute_bash", f"Exit code: 0\n{SECRET}", 0, 1, 0.0)
    events = (
        ToolOutput(1, "stdout", SECRET[:9]),
        ToolOutput(1, "stderr", "busy"),
        ToolOutput(1, "stdout", SECRET[9:]),
        ended,
    )
    assert redacted(*events) == [
        ToolOutput(1, "stdout", SHOWN),
        ToolOutput(1, "stderr", "busy"),
        ToolCallFinished(1, "c", "execute_bash", f"Exit code: 0\n{SHOWN}", 0, 1, 0.0),
    ]


def test_held_back_end_of_the_answer_precedes_the_end_of_the_run() -> None:
    pieces = (AnswerDelta(SECRET[:9], {"content": []}), AnswerDelta(SECRET[9:]), FINISHED)
    assert redacted(*pieces) == [AnswerDelta(SHOWN), FINISHED]
