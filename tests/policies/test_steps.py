"""How steps are shown to whom, and that our own words for them are known again."""

import pytest

from policies.steps import (
    STEPS_MODES,
    StepsSetting,
    contains_steps,
    default_mode,
    default_mode_for_messages,
    default_mode_for_responses,
    is_steps_mode,
    outcome_line,
)


@pytest.mark.parametrize(
    ("headers", "profile"),
    [
        ([], "reasoning"),
        (["user-agent", "authorization"], "reasoning"),
        (["X-OpenWebUI-Chat-Id"], "items"),
        (["accept", "x-openwebui-user-jwt"], "items"),
    ],
)
def test_a_client_is_known_by_its_headers(headers: list[str], profile: str) -> None:
    assert default_mode("auto", headers) == profile


@pytest.mark.parametrize("profile", STEPS_MODES)
def test_server_setting_overrides_the_default_mode(profile: str) -> None:
    assert is_steps_mode(profile)
    assert default_mode(profile, ["X-OpenWebUI-Chat-Id"]) == profile


@pytest.mark.parametrize(
    ("asks", "profile"),
    [
        ({"code_execution": False, "thinking": False}, "off"),
        ({"code_execution": False, "thinking": True}, "reasoning"),
        ({"code_execution": True, "thinking": False}, "items"),
        ({"code_execution": True, "thinking": True}, "items"),
    ],
)
def test_a_client_of_anthropics_is_shown_what_it_asks_for(
    asks: dict[str, bool], profile: str
) -> None:
    assert default_mode_for_messages("auto", **asks) == profile
    assert default_mode_for_messages("events", **asks) == "events"


@pytest.mark.parametrize(
    ("setting", "shows_items", "profile"),
    [
        ("auto", True, "items"),
        ("auto", False, "reasoning"),
        ("items", True, "items"),
        ("items", False, "reasoning"),
        ("events", True, "events"),
        ("off", False, "off"),
    ],
)
def test_items_of_responses_are_shown_to_who_asked_for_a_tool_that_makes_them(
    setting: StepsSetting, shows_items: bool, profile: str
) -> None:
    assert default_mode_for_responses(setting, shows_items=shows_items) == profile


@pytest.mark.parametrize("word", ["auto", "", "Items", 1, None, ["items"], {}])
def test_only_a_profile_is_one(word: object) -> None:
    assert not is_steps_mode(word)


@pytest.mark.parametrize("exit_code", [None, 0, 137, -9])
@pytest.mark.parametrize("output_lines", [None, 0, 1, 2000])
@pytest.mark.parametrize("duration_s", [0.0, 1.25, 3600.0])
def test_the_end_of_a_step_is_known_again(
    exit_code: int | None, duration_s: float, output_lines: int | None
) -> None:
    line = outcome_line(exit_code, duration_s, output_lines)
    assert contains_steps(f"Let me see.\n$ ls\n{line}\nSo.")


@pytest.mark.parametrize(
    "thinking",
    ["", "Let me see.", "$ ls", "[1.5]", "it took [0.3 s] or so", "[exit 0]", "[1, 2, 3 lines]"],
)
def test_thinking_without_steps_has_none(thinking: str) -> None:
    assert not contains_steps(thinking)
