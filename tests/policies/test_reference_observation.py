"""Observations of the reference style. The expected texts equal those of the reference
implementation."""

import pytest

from policies.observation import CommandOutcome, ObservationLimits
from policies.reference_style import (
    FINISHED,
    NO_COMMAND,
    command_observation,
    invalid_arguments_observation,
    steps_remaining_line,
    tool_observation,
    unknown_tool_observation,
)

LIMITS = ObservationLimits(max_chars=1 << 20, max_lines=80)
TIMEOUT_OBSERVATION = (
    "Exit code: -1\n"
    "Execution output of \\[execute_bash]:\n"
    "\\[STDOUT]\n"
    "The command took too long to execute (>120s)"
)


def observation(
    exit_code: int = 0, stdout: str = "", stderr: str = "", *, timed_out: bool = False
) -> str:
    outcome = CommandOutcome(exit_code, stdout, stderr, timeout_s=120, timed_out=timed_out)
    return command_observation(outcome, LIMITS)


@pytest.mark.parametrize(
    ("exit_code", "stdout", "stderr", "expected"),
    [
        (
            0,
            "hi\n",
            "",
            "Exit code: 0\nExecution output of \\[execute_bash]:\n\\[STDOUT]\nhi\n",
        ),
        (
            3,
            "",
            "",
            "Exit code: Error: Exit code 3\nExecution output of \\[execute_bash]:\n\\[STDOUT]\n",
        ),
        (
            0,
            "hi\n",
            "bad\n",
            "Exit code: 0\nExecution output of \\[execute_bash]:\n"
            "\\[STDOUT]\nhi\n\n\\[STDERR]\nbad\n",
        ),
        (
            1,
            " \n",
            "bad",
            "Exit code: Error: Exit code 1\nExecution output of \\[execute_bash]:\n"
            "\\[STDOUT]\n\n\\[STDERR]\nbad",
        ),
        (0, "x", " \n", "Exit code: 0\nExecution output of \\[execute_bash]:\n\\[STDOUT]\nx"),
    ],
)
def test_reference_observation_shows_exit_code_and_both_streams(
    exit_code: int, stdout: str, stderr: str, expected: str
) -> None:
    assert observation(exit_code, stdout, stderr) == expected


def test_reference_observation_omits_only_colours_and_carriage_returns() -> None:
    shown = observation(0, "\x1b[1;31mred\x1b[0m\r\n\x1b[2Jcleared\n")
    assert shown.endswith("\\[STDOUT]\nred\n\x1b[2Jcleared\n")


def test_reference_observation_shows_eighty_lines_completely() -> None:
    text = "".join(f"{n}\n" for n in range(80))
    assert observation(0, text).endswith(f"\\[STDOUT]\n{text}")


def test_reference_observation_shows_first_and_last_forty_lines_of_a_longer_stream() -> None:
    text = "".join(f"{n}\n" for n in range(81))
    first, last = "\n".join(map(str, range(40))), "\n".join(map(str, range(41, 81)))
    cut = (
        f"{first}\n--------------------------------------------------\n"
        "<Observation truncated in middle for saving context>\n"
        f"--------------------------------------------------\n{last}"
    )
    assert observation(0, text, text) == (
        f"Exit code: 0\nExecution output of \\[execute_bash]:\n\\[STDOUT]\n{cut}\n\\[STDERR]\n{cut}"
    )


def test_long_line_is_not_cut_in_a_reference_observation() -> None:
    assert observation(0, "x" * 300_000).endswith("x" * 300_000)


def test_reference_observation_of_a_timed_out_command_omits_its_output() -> None:
    assert observation(143, "partial\n", "more\n", timed_out=True) == TIMEOUT_OBSERVATION


def test_exit_code_124_counts_as_a_timeout_in_the_reference_style() -> None:
    assert observation(124, "partial\n") == TIMEOUT_OBSERVATION


def test_fixed_tool_texts_of_the_reference_style_equal_those_of_the_reference() -> None:
    assert FINISHED == "<<< Finished >>>"
    assert NO_COMMAND == "Error: No command provided."
    assert (
        invalid_arguments_observation() == "Exit code: 0\nExecution output of \\[execute_bash]:\n"
    )
    assert tool_observation("str_replace_editor", "x") == (
        "Execution output of \\[str_replace_editor]:\nx"
    )
    assert unknown_tool_observation("frobnicate") == "Unknown action: frobnicate"
    assert steps_remaining_line(100) == "\nSteps Remaining: 100"
