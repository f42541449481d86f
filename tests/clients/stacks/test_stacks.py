"""Every client stack, unmodified and in a process of its own, against the proxy."""

from collections.abc import Callable
from typing import Any

import pytest

from policies.steps import STEPS_MODES, StepsMode
from tests.clients.stacks.conversations import (
    ANSWER,
    COMMAND,
    FAULT,
    PLACE,
    REFUSAL,
    THOUGHT,
    UNAVAILABLE,
    WARMTH,
)
from tests.clients.stacks.session import MODEL, Seen
from tests.clients.stacks.stacks import STACKS, Stack, Variant

SeenBy = Callable[[Stack], Seen]

FILES = {"table.csv": "<table.csv>", "dot.gif": "<dot.gif>"}
PICTURE = "data:image/gif;base64,R0lGODlhOw=="
FAULTS = {"refused": REFUSAL, "broken": FAULT, "cut": FAULT, "unavailable": UNAVAILABLE}

in_every_variant = pytest.mark.parametrize(
    ("stack", "variant", "profile"),
    [
        pytest.param(stack, variant, profile, id=f"{stack}-{variant.name}-{profile}")
        for stack in STACKS
        for variant in stack.variants
        for profile in STEPS_MODES
    ],
)


def each_scenario(of: Callable[[Stack], tuple[str, ...]]) -> pytest.MarkDecorator:
    """Parametrize over the scenarios of a kind that each stack has, under each steps setting."""
    return pytest.mark.parametrize(
        ("stack", "scenario", "profile"),
        [
            pytest.param(stack, scenario, profile, id=f"{stack}-{scenario}-{profile}")
            for stack in STACKS
            for scenario in of(stack)
            for profile in STEPS_MODES
        ],
    )


@in_every_variant
def test_client_library_shows_the_answer_to_a_question_once(
    stack: Stack, variant: Variant, profile: StepsMode, seen_by: SeenBy
) -> None:
    result = seen_by(stack)[profile, f"question {variant.name}"]
    assert "raised" not in result, result
    seen = result["seen"]
    assert shown(seen, variant) == shown(
        {
            "text": ANSWER,
            "finish": "stop",
            "calls": [],
            "thought": "",
            "usage": [100, 20],
            "cited": {},
            "pictures": [],
            "files": {},
        },
        variant,
    )


@in_every_variant
def test_client_library_shows_the_files_and_the_steps_that_the_steps_setting_selects(
    stack: Stack, variant: Variant, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)[profile, f"work {variant.name}"]["seen"]
    if "thought" in variant.shows:
        seen = {**seen, "thought": steps_in(seen["thought"])}
    # Open WebUI, which uses items, would load a third-party icon for each citation.
    cited = {} if profile == "items" and variant.streams else FILES
    assert shown(seen, variant) == shown(
        {
            "text": "Here: [table.csv](<table.csv>) and [dot.gif](<dot.gif>).",
            "finish": "stop",
            "calls": [],
            "thought": (THOUGHT, profile in variant.thinks),
            "usage": [200, 40],
            "cited": cited,
            "pictures": [PICTURE],
            "files": FILES,
        },
        variant,
    )


@in_every_variant
def test_failed_request_raises_the_client_librarys_own_exception(
    stack: Stack, variant: Variant, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)
    raised = {fault: seen[profile, f"{fault} {variant.name}"]["raised"] for fault in FAULTS}
    expected = variant.raises_at(profile)
    for fault, words in FAULTS.items():
        assert raised[fault]["kind"] in expected[fault], fault
        assert words in raised[fault]["words"]


@each_scenario(lambda stack: stack.tools)
def test_client_tool_is_called_and_its_result_used(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    steps = seen_by(stack)[profile, scenario]["seen"]
    assert [(step["text"] or "", step["calls"]) for step in steps] == [
        ("", ["warmth"]),
        (WARMTH, []),
    ]


@each_scenario(lambda stack: stack.agents)
def test_agent_with_a_tool_reaches_its_answer(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    assert seen_by(stack)[profile, scenario] == {"seen": WARMTH}


@each_scenario(lambda stack: ("hosted",) if stack.has_shell else ())
def test_steps_setting_decides_the_items_shown_before_a_client_tool_call(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    steps = {
        "off": [],
        "reasoning": ["reasoning"],
        "items": ["shell_call", "shell_call_output"],
        "events": [],
    }
    assert seen_by(stack)[profile, scenario] == {"seen": [*steps[profile], "function_call"]}


@each_scenario(lambda stack: ("hosted",) if stack.shows_calls else ())
def test_hosted_shell_calls_are_not_executed_by_the_client(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    sandbox_calls = ["shell"] if profile == "items" else []
    assert seen_by(stack)[profile, scenario] == {
        "seen": {
            "tool-call": [*sandbox_calls, "warmth"],
            "tool-result": [*sandbox_calls, "warmth"],
            "tool-error": [],
        }
    }


@each_scenario(lambda stack: stack.shapes)
def test_structured_answer_has_the_requested_shape(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)[profile, scenario]["seen"]
    assert (seen if isinstance(seen, list) else [seen]) in ([PLACE], [PLACE, PLACE])


@each_scenario(lambda stack: ("models",) if stack.lists_models else ())
def test_models_are_listed_with_and_without_plain_suffix(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    assert seen_by(stack)[profile, scenario] == {"seen": [MODEL, f"{MODEL}:plain"]}


def shown(answer: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the fields of an answer that the client can show."""
    return {name: answer[name] for name in variant.shows}


def steps_in(thought: str) -> tuple[str, bool]:
    """Split reasoning into the model's own and whether the command follows."""
    own, _, steps = thought.partition("\n")
    return own, steps.startswith(f"````console\n$ {COMMAND}\n")
