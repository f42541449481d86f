"""Redaction of streamed texts, which are held back until a secret cannot continue."""

from typing import Any

import pytest

from policies.limits import StopReason
from policies.redaction import Redaction, SecretFinder
from proxy.agent.events import (
    AnswerDelta,
    Event,
    ModelCallFinished,
    Narration,
    ReasoningDelta,
    RunFinished,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.redactor import TOO_DEEP, Redactor

SECRET = "ghp_" + "q7R2" * 9
SHOWN = "[redacted github]"
FINISHED = RunFinished(StopReason.SUBMITTED)


def redacted(*events: Event) -> list[Event]:
    redactor = Redactor(SecretFinder(Redaction(("github",))))
    return [shown for event in events for shown in redactor.redact_event(event)]


def test_held_reasoning_and_narration_are_emitted_separately_before_the_tool_call() -> None:
    call = ToolCallStarted(1, "c", "execute_bash", {"command": f"echo {SECRET}", "n": [SECRET, 1]})
    events = (ReasoningDelta("I "), ReasoningDelta("think."), Narration("I do."), call)
    assert redacted(*events) == [
        ReasoningDelta("I think."),
        Narration("I do."),
        ToolCallStarted(1, "c", "execute_bash", {"command": f"echo {SHOWN}", "n": [SHOWN, 1]}),
    ]


def test_secret_split_across_output_pieces_is_redacted_despite_events_between_them() -> None:
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


def test_held_back_rest_of_the_answer_is_emitted_before_the_run_ends() -> None:
    pieces = (AnswerDelta(SECRET[:9], {"content": []}), AnswerDelta(SECRET[9:]), FINISHED)
    assert redacted(*pieces) == [AnswerDelta(SHOWN), FINISHED]


def message_with(arguments: str) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


def redacted_arguments(arguments: str) -> str:
    """Return the arguments of a tool call in a redacted model call."""
    (event,) = redacted(ModelCallFinished(0, [message_with(arguments)], {}, 0.1))
    assert isinstance(event, ModelCallFinished)
    text = event.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(text, str)
    return text


ESCAPED = SECRET.replace("g", "\\u0067", 1)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (f'{{"command": "{ESCAPED}"}}', f'{{"command": "{SHOWN}"}}'),
        (f'{{"{ESCAPED}": "ls"}}', f'{{"{SHOWN}": "ls"}}'),
        (f'{{"command": "{ESCAPED}"', f'{{"command": "{SHOWN}"'),
        (f'{{"command": "{SECRET}"', f'{{"command": "{SHOWN}"'),
        ('{"command": "\\u0067', '{"command": "\\u0067'),
        (f'{{"command": {"[" * 700}"{ESCAPED}"{"]" * 700}}}', TOO_DEEP),
        (f'{{"command": {"[" * 70_000}"{ESCAPED}"', TOO_DEEP),
    ],
    ids=["value", "key", "invalid", "unescaped", "no secret", "deep", "too deep to read"],
)
def test_arguments_in_a_model_call_are_redacted_however_they_are_written(
    arguments: str, shown: str
) -> None:
    assert redacted_arguments(arguments) == shown


def test_redactor_replaces_a_too_deeply_nested_value_by_a_note() -> None:
    deep: Any = SECRET
    for _ in range(900):
        deep = [deep]
    call = ModelCallFinished(0, [{"role": "assistant", "extra": deep}], {"extra": deep}, 0.1)
    started = ToolCallStarted(1, "c", "execute_bash", {"command": "ls", "extra": deep})
    shown = {"command": "ls", "extra": TOO_DEEP}
    assert redacted(call, started) == [
        ModelCallFinished(0, [{"role": "assistant", "extra": TOO_DEEP}], {"extra": TOO_DEEP}, 0.1),
        ToolCallStarted(1, "c", "execute_bash", shown),
    ]
