"""Choice of the steps mode for a client, and detection of steps in reasoning."""

import pytest

from policies.steps import (
    STEPS_MODES,
    StepsSetting,
    contains_steps,
    default_mode,
    default_mode_for_messages,
    default_mode_for_responses,
    outcome_line,
)


@pytest.mark.parametrize(
    ("headers", "mode"),
    [
        ([], "reasoning"),
        (["user-agent", "authorization"], "reasoning"),
        (["X-OpenWebUI-Chat-Id"], "items"),
        (["accept", "x-openwebui-user-jwt"], "items"),
    ],
)
def test_client_headers_choose_the_default_steps_mode(headers: list[str], mode: str) -> None:
    assert default_mode("auto", headers) == mode


@pytest.mark.parametrize("mode", STEPS_MODES)
def test_server_setting_overrides_the_default_steps_mode(mode: str) -> None:
    assert default_mode(mode, ["X-OpenWebUI-Chat-Id"]) == mode


@pytest.mark.parametrize(
    ("requested", "mode"),
    [
        ({"has_code_execution": False, "wants_thinking": False}, "off"),
        ({"has_code_execution": False, "wants_thinking": True}, "reasoning"),
        ({"has_code_execution": True, "wants_thinking": False}, "items"),
        ({"has_code_execution": True, "wants_thinking": True}, "items"),
    ],
)
def test_default_steps_mode_of_the_messages_api_depends_on_code_execution_and_thinking(
    requested: dict[str, bool], mode: str
) -> None:
    assert default_mode_for_messages("auto", **requested) == mode
    assert default_mode_for_messages("events", **requested) == "events"


@pytest.mark.parametrize(
    ("setting", "shows_items", "mode"),
    [
        ("auto", True, "items"),
        ("auto", False, "reasoning"),
        ("items", True, "items"),
        ("items", False, "reasoning"),
        ("events", True, "events"),
        ("off", False, "off"),
    ],
)
def test_responses_api_shows_steps_as_items_only_with_a_built_in_tool_that_has_items(
    setting: StepsSetting, shows_items: bool, mode: str
) -> None:
    assert default_mode_for_responses(setting, shows_items=shows_items) == mode


@pytest.mark.parametrize("exit_code", [None, 0, 137, -9])
@pytest.mark.parametrize("output_lines", [None, 0, 1, 2000])
@pytest.mark.parametrize("duration_s", [0.0, 1.25, 3600.0])
def test_reasoning_with_an_outcome_line_contains_steps(
    exit_code: int | None, duration_s: float, output_lines: int | None
) -> None:
    line = outcome_line(exit_code, duration_s, output_lines)
    assert contains_steps(f"Let me see.\n$ ls\n{line}\nSo.")


@pytest.mark.parametrize(
    "reasoning",
    ["", "Let me see.", "$ ls", "[1.5]", "it took [0.3 s] or so", "[exit 0]", "[1, 2, 3 lines]"],
)
def test_reasoning_without_an_outcome_line_contains_no_steps(reasoning: str) -> None:
    assert not contains_steps(reasoning)
