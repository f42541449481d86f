"""Steps as text: what a person sees of the work."""

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.agent.events import Event, ReasoningDelta, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.wire.steps import MAX_COMMAND_CHARS, StepText, extension


def started(name: str, arguments: Mapping[str, Any]) -> ToolCallStarted:
    return ToolCallStarted(2, "c1", name, arguments)


def finished(
    exit_code: int | None, lines: int | None, duration_s: float = 0.04
) -> ToolCallFinished:
    return ToolCallFinished(
        step=2,
        call_id="c1",
        name="t",
        observation="a\nb",
        exit_code=exit_code,
        output_lines=lines,
        duration_s=duration_s,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("execute_bash", {"command": "python a.py"}, "$ python a.py\n"),
        ("execute_bash", {}, "$ \n"),
        ("execute_bash", {"command": ["ls"]}, "$ ['ls']\n"),
        (
            "str_replace_editor",
            {"command": "create", "path": "/testbed/a.py", "file_text": "secret"},
            "str_replace_editor create /testbed/a.py\n",
        ),
        ("str_replace_editor", {}, "str_replace_editor\n"),
        ("submit", {"answer": "42"}, "submit\n"),
        ("nonsense", {"x": 1}, "nonsense\n"),
    ],
)
def test_a_call_is_one_short_line(name: str, arguments: dict[str, Any], shown: str) -> None:
    assert StepText("reasoning").of(started(name, arguments)) == shown


def test_a_long_command_is_cut() -> None:
    shown = StepText("reasoning").of(started("execute_bash", {"command": "x" * 100_000}))
    assert shown == "$ " + "x" * MAX_COMMAND_CHARS + " ...\n"


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (finished(0, 3), "[exit 0, 0.0 s, 3 lines]\n"),
        (finished(1, 1, 12.34), "[exit 1, 12.3 s, 1 line]\n"),
        (finished(0, 0), "[exit 0, 0.0 s, 0 lines]\n"),
        (finished(None, None), "[0.0 s]\n"),
    ],
)
def test_an_outcome_is_one_short_line(event: ToolCallFinished, shown: str) -> None:
    assert StepText("reasoning").of(event) == shown


def test_a_step_begins_on_a_line_of_its_own() -> None:
    text = StepText("reasoning")
    events: list[Event] = [
        started("submit", {}),
        finished(None, None),
        ReasoningDelta("Hm."),
        ToolOutput(2, "stdout", "unseen\n"),
        started("submit", {}),
        ReasoningDelta("So.\n"),
        started("submit", {}),
    ]
    assert "".join(map(text.of, events)) == "submit\n[0.0 s]\nHm.\nsubmit\nSo.\nsubmit\n"


def test_profile_off_shows_thinking_alone() -> None:
    text = StepText("off")
    events: list[Event] = [started("submit", {}), finished(0, 1), ReasoningDelta("Hm.")]
    assert [text.of(event) for event in events] == ["", "", "Hm."]


def test_half_a_surrogate_pair_is_no_text() -> None:
    text = StepText("reasoning")
    assert text.of(ReasoningDelta("a \ud83d")) == "a ?"
    assert text.of(started("execute_bash", {"command": "\ud83d"})) == "\n$ ?\n"


def test_only_the_ends_of_a_step_carry_our_object() -> None:
    assert extension(started("execute_bash", {}), "r1") == {
        "v": 1,
        "run": "r1",
        "step": 2,
        "kind": "tool_start",
        "tool": "execute_bash",
    }
    assert extension(finished(7, 1, 1.21), "r1") == {
        "v": 1,
        "step": 2,
        "kind": "tool_end",
        "exit_code": 7,
        "ms": 1210,
    }
    assert extension(ReasoningDelta("Hm."), "r1") is None
