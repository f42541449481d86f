"""Steps as text in the reasoning."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from markdown_it import MarkdownIt

from policies.steps import OUTPUT_LEFT_OUT, StepsMode
from proxy.agent.events import (
    Event,
    ReasoningDelta,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.schemas.steps import (
    HEAD_CHARS,
    HEAD_LINES,
    MAX_COMMAND_CHARS,
    TAIL_CHARS,
    TAIL_LINES,
    AnswerState,
    StepTextRenderer,
    step_extension,
)


class StepText:
    """Renders the events of a run as text."""

    def __init__(self, steps: StepsMode) -> None:
        self._state = AnswerState()
        self._renderer = StepTextRenderer(steps, self._state)
        self.close_after_failure = self._renderer.close_after_failure

    def render(self, event: Event) -> str:
        text = self._renderer.render(event)
        self._state.update(event)
        return text


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
        ("execute_bash", {"command": "y", "job_id": "j1"}, "$ [job j1] y\n"),
        ("execute_bash", {"command": ["ls"]}, "$ ['ls']\n"),
        (
            "str_replace_editor",
            {"command": "create", "path": "/testbed/a.py", "file_text": "secret"},
            "str_replace_editor create /testbed/a.py\n",
        ),
        ("str_replace_editor", {}, "str_replace_editor\n"),
        ("nonsense", {"x": 1}, "nonsense\n"),
    ],
)
def test_tool_call_is_shown_as_one_line(name: str, arguments: dict[str, Any], shown: str) -> None:
    assert StepText("reasoning").render(started(name, arguments)) == f"````console\n{shown}"


def test_long_command_is_cut_when_it_is_shown() -> None:
    shown = StepText("reasoning").render(started("execute_bash", {"command": "x" * 100_000}))
    assert shown == "````console\n$ " + "x" * MAX_COMMAND_CHARS + " ...\n"


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (finished(0, 3), "[exit 0, 0.0 s, 3 lines]\n"),
        (finished(1, 1, 12.34), "[exit 1, 12.3 s, 1 line]\n"),
        (finished(0, 0), "[exit 0, 0.0 s, 0 lines]\n"),
        (finished(None, None), "[0.0 s]\n"),
    ],
)
def test_outcome_of_a_command_is_shown_as_one_line(event: ToolCallFinished, shown: str) -> None:
    text = StepText("reasoning")
    text.render(started("t", {}))
    assert text.render(event) == f"{shown}````\n"


def shown_of(output: list[str], observation: str = "") -> str:
    """Return the shown output of a command, between the call and the outcome."""
    text = StepText("reasoning")
    text.render(started("execute_bash", {"command": "c"}))
    pieces = [text.render(ToolOutput(2, "stdout", piece)) for piece in output]
    end = text.render(replace(finished(0, 1), observation=observation))
    return "".join([*pieces, end.removesuffix("[exit 0, 0.0 s, 1 line]\n````\n")])


def test_output_line_is_shown_only_when_it_is_complete() -> None:
    text = StepText("reasoning")
    text.render(started("execute_bash", {"command": "c"}))
    events = [
        ToolOutput(2, "stdout", "one\ntw"),
        ToolOutput(2, "stderr", "oh"),
        ToolOutput(2, "stdout", "o\nthree"),
        finished(0, 3),
    ]
    assert [text.render(event) for event in events] == [
        "one\n",
        "",
        "two\n",
        "three\noh\n[exit 0, 0.0 s, 3 lines]\n````\n",
    ]


def test_terminal_control_sequences_are_applied_to_output() -> None:
    assert shown_of(["\x1b[31mred", "\x1b[0m\n 10%\r", " 90%\rdone\n"]) == "red\ndone\n"


def test_output_slightly_above_the_limit_is_shown_completely() -> None:
    lines = [f"{n}\n" for n in range(HEAD_LINES + TAIL_LINES)]
    assert shown_of(lines) == "".join(lines)


def test_long_output_is_shortened_to_its_beginning_and_end() -> None:
    lines = [f"{n}" for n in range(1000)]
    expected = [*lines[:HEAD_LINES], OUTPUT_LEFT_OUT, *lines[-TAIL_LINES:], ""]
    pieces = [f"{line}\n" for line in lines[:200]]  # live output is limited to its beginning
    assert shown_of(pieces, "\n".join(lines)) == "\n".join(expected)


@pytest.mark.parametrize("piece", ["x" * 999, "x" * 999 + "\n", "\n", "\r", "x\r" * 500])
def test_shown_output_is_bounded(piece: str) -> None:
    shown = shown_of([piece] * 1000, "y" * 30_000)
    assert len(shown) <= HEAD_CHARS + len(OUTPUT_LEFT_OUT) + TAIL_CHARS + 2


def test_step_begins_on_a_new_line() -> None:
    text = StepText("reasoning")
    step = [started("nonsense", {}), finished(None, None)]
    events: list[Event] = [
        *step,
        ReasoningDelta("Hm."),
        ToolOutput(2, "stdout", "nobody asked\n"),
        *step,
        ReasoningDelta("So.\n"),
        *step,
    ]
    shown = "````console\nnonsense\n[0.0 s]\n````\n"
    assert "".join(map(text.render, events)) == f"{shown}Hm.\n{shown}So.\n{shown}"


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the type and the content of each Markdown block of a text."""
    tokens = MarkdownIt().parse(text)
    return [(token.type, token.content) for token in tokens if token.content]


@pytest.mark.parametrize("before", ["", "> "])
@pytest.mark.parametrize(
    "fence", ["```", "````", "   `````  ", "\t````", "````console", "~~~~", "```\r````\ra"]
)
def test_fences_in_output_do_not_split_the_markdown_block(fence: str, before: str) -> None:
    text = StepText("reasoning")
    command = f"cat <<E\n{fence}\n# $x$\nE"
    events: list[Event] = [
        ReasoningDelta("Hm."),
        started("execute_bash", {"command": command}),
        ToolOutput(2, "stdout", f"# one\n{fence}\n"),
        ToolOutput(2, "stderr", fence),
        finished(0, 3),
        ReasoningDelta("So."),
    ]
    lines = "".join(map(text.render, events)).splitlines(keepends=True)
    first, (kind, step), last = blocks_of("".join(f"{before}{line}" for line in lines))
    assert (first, kind, last) == (("inline", "Hm."), "fence", ("inline", "So."))
    assert step.startswith("$ cat <<E\n")
    assert step.endswith("\n[exit 0, 0.0 s, 3 lines]\n")


def test_fences_of_four_backticks_in_output_are_indented() -> None:
    assert shown_of(["a\n````\n", "  `````\nb````\n```\n````"]) == (
        "a\n    ````\n      `````\nb````\n```\n    ````\n"
    )


def test_fences_in_the_tail_of_long_output_are_indented() -> None:
    assert shown_of(["x\n"] * 100, "y\n````\nz").endswith(f"{OUTPUT_LEFT_OUT}\ny\n    ````\nz\n")


def test_block_of_an_unfinished_step_is_closed_after_a_failure() -> None:
    text = StepText("reasoning")
    text.render(started("nonsense", {}))
    assert text.close_after_failure() == "[not finished]\n````\n"


def test_submit_is_not_shown_as_a_step() -> None:
    text = StepText("reasoning")
    events: list[Event] = [started("submit", {"answer": "42"}), finished(None, None)]
    assert [text.render(event) for event in events] == ["", ""]
    assert text.close_after_failure() == ""


def test_with_steps_off_only_reasoning_is_shown() -> None:
    text = StepText("off")
    events: list[Event] = [started("nonsense", {}), finished(0, 1), ReasoningDelta("Hm.")]
    assert [text.render(event) for event in events] == ["", "", "Hm."]


def test_lone_surrogates_in_shown_steps_are_replaced() -> None:
    text = StepText("reasoning")
    assert text.render(ReasoningDelta("a \ud83d")) == "a ?"
    assert text.render(started("execute_bash", {"command": "\ud83d"})) == "\n````console\n$ ?\n"


def test_step_extension_describes_the_start_and_the_end_of_a_step() -> None:
    assert step_extension(started("execute_bash", {}), "r1") == {
        "v": 1,
        "run_id": "r1",
        "step": 2,
        "kind": "tool_start",
        "tool": "execute_bash",
    }
    assert step_extension(finished(7, 1, 1.21), "r1") == {
        "v": 1,
        "step": 2,
        "kind": "tool_end",
        "exit_code": 7,
        "ms": 1210,
    }
    output = {"v": 1, "step": 2, "kind": "tool_output"}
    assert step_extension(ToolOutput(2, "stdout", "a"), "r1") == output
    assert step_extension(ReasoningDelta("Hm."), "r1") is None


def test_note_on_omitted_steps_states_how_many_there_are() -> None:
    assert StepText("reasoning").render(StepsOmitted(12)) == "[the first 12 steps are not kept]\n"
    assert StepText("off").render(StepsOmitted(12)) == ""
