"""Observations of commands: outcome first, without terminal control sequences, of limited size."""

import pytest

from policies.observation import (
    DEFAULT_LIMITS,
    CommandOutcome,
    ObservationLimits,
    bash_observation,
    output_cap,
    printable,
    terminal_text,
    truncate_middle,
)


def _observation(
    *,
    exit_code: int = 0,
    stdout: str = "",
    stderr: str = "",
    timed_out: bool = False,
    limits: ObservationLimits = DEFAULT_LIMITS,
    oom_kills: int = 0,
    pids_refused: int = 0,
) -> str:
    outcome = CommandOutcome(
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        timeout_s=120.0,
        timed_out=timed_out,
        oom_kills=oom_kills,
        pids_refused=pids_refused,
    )
    return bash_observation(outcome, limits)


def test_observation_of_a_successful_command_shows_exit_code_and_output() -> None:
    assert _observation(stdout="one\ntwo\n") == "Exit code: 0\n[stdout]\none\ntwo"


def test_observation_of_a_failed_command_shows_exit_code_and_both_streams() -> None:
    text = _observation(exit_code=2, stdout="partly\n", stderr="no such thing\n")
    assert text == "Exit code: 2\n[stdout]\npartly\n[stderr]\nno such thing"


def test_blank_output_stream_has_no_section_in_an_observation() -> None:
    assert _observation(stdout=" \n\t\n", stderr="warning") == "Exit code: 0\n[stderr]\nwarning"


def test_observation_of_a_command_without_output_says_so() -> None:
    assert _observation(stdout="\n") == "Exit code: 0\n(no output)"


def test_observation_keeps_inner_blank_lines_and_indentation() -> None:
    assert _observation(stdout="  a\n\n\n\tb  \n\n") == "Exit code: 0\n[stdout]\n  a\n\n\n\tb  \n"


def test_observation_of_a_timed_out_command_shows_partial_output_and_advice() -> None:
    text = _observation(exit_code=137, stdout="half\n", timed_out=True)
    assert text.startswith("Exit code: 137 (timed out)\n[stdout]\nhalf\n[timed out after 120 s:")
    assert "the command was stopped; partial output above" in text


def test_exit_code_124_is_no_timeout_in_the_default_style() -> None:
    assert _observation(exit_code=124, stdout="x") == "Exit code: 124\n[stdout]\nx"


def test_observation_of_a_killed_program_reports_no_timeout() -> None:
    assert _observation(exit_code=137) == (
        "Exit code: 137 (killed; often for want of memory)\n(no output)"
    )


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[m", "red true"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        ("\x1b[2K\x1b[1Gline\x1b[?25h\x1b(B", "line"),
        ("10%\r50%\r100%\ndone\n", "100%\ndone\n"),
        ("working...\rdone\r", "done"),
        ("windows\r\nlines\r\n", "windows\nlines\n"),
        ("a\r\r\nb", "a\nb"),
        ("nul \0 bell \x07 half \ud800", "nul \ufffd bell \ufffd half \ufffd"),
        ("tab\tü 数 🎉\n", "tab\tü 数 🎉\n"),
    ],
)
def test_terminal_text_is_the_text_that_a_terminal_would_finally_show(raw: str, shown: str) -> None:
    assert terminal_text(raw) == shown


def test_unfinished_escape_sequence_removes_no_other_text() -> None:
    assert terminal_text("before \x1b]0;never closed\nafter") == "before \nafter"
    assert terminal_text("cut \x1b") == "cut \ufffd"


def test_printable_replaces_control_characters_and_lone_surrogates() -> None:
    assert printable("caf\udce9\r\x1b").encode() == "caf\ufffd\ufffd\ufffd".encode()


def test_output_within_the_limits_is_not_truncated() -> None:
    limits = ObservationLimits(max_chars=20, max_lines=4)
    for text in ("", "a\nb\nc\nd", "x" * 20, "\n\n\n"):
        assert truncate_middle(text, limits) == text


def test_long_line_is_truncated_in_its_middle() -> None:
    clipped = truncate_middle("a" * 500 + "b" * 500, ObservationLimits(max_chars=100))
    assert clipped == "a" * 50 + "\n[... 900 characters left out ...]\n" + "b" * 50


def test_middle_of_too_many_lines_is_left_out() -> None:
    text = "\n".join(str(number) for number in range(1, 101))
    clipped = truncate_middle(text, ObservationLimits(max_lines=4))
    left_out_count = len(text) - len("1\n2") - len("99\n100")
    assert clipped == f"1\n2\n[... {left_out_count} characters left out ...]\n99\n100"


def test_each_output_stream_of_an_observation_is_bounded() -> None:
    limits = ObservationLimits(max_chars=1000, max_lines=50)
    text = _observation(stdout="out\n" * 1000, stderr="e" * 100_000, limits=limits)
    assert len(text) < 1600
    assert text.count("characters left out") == 2


def test_output_that_the_sandbox_has_truncated_is_not_truncated_again() -> None:
    limits = ObservationLimits()
    cap = output_cap(limits)
    marker = "[... 1000000000000 bytes, 1000000000000 lines left out ...]"
    half = "x" * (cap.max_bytes // 2)
    text = f"{half}\n{marker}\n{half}"
    assert truncate_middle(text, limits) == text
    lines = ["x"] * (cap.max_lines // 2)
    text = "\n".join([*lines, marker, *lines])
    assert truncate_middle(text, limits) == text


def test_observation_names_the_sandbox_limit_that_was_reached() -> None:
    assert "out of memory: a process was killed" in _observation(exit_code=137, oom_kills=1)
    assert "out of memory: several processes were killed" in _observation(oom_kills=3)
    assert "too many processes" in _observation(exit_code=1, pids_refused=12)


def test_observation_of_a_running_job_names_the_job_id() -> None:
    outcome = CommandOutcome(0, "so far\n", "", timeout_s=600, duration_s=60.2, job_id="c7")
    lines = bash_observation(outcome).splitlines()
    assert lines[:3] == ["Still running after 60 s, as job c7", "[stdout]", "so far"]
    assert "job_id 'c7'" in lines[3]


def test_job_that_waits_for_input_is_reported() -> None:
    outcome = CommandOutcome(0, "name? ", "", timeout_s=600, job_id="c7", waiting=True)
    text = bash_observation(outcome)
    assert text.startswith("Waiting for input after 0 s, as job c7")
    assert "waits for somebody to type" in text
