"""Every client there is, unmodified and in a process of its own, before the whole house."""

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
from tests.clients.stacks.stacks import STACKS, Stack, Way

SeenBy = Callable[[Stack], Seen]

FILES = {"table.csv": "<table.csv>", "dot.gif": "<dot.gif>"}
PICTURE = "data:image/gif;base64,R0lGODlhOw=="
FAULTS = {"refused": REFUSAL, "broken": FAULT, "cut": FAULT, "unavailable": UNAVAILABLE}

in_every_way = pytest.mark.parametrize(
    ("stack", "way", "profile"),
    [
        pytest.param(stack, way, profile, id=f"{stack}-{way.name}-{profile}")
        for stack in STACKS
        for way in stack.ways
        for profile in STEPS_MODES
    ],
)


def each(of: Callable[[Stack], tuple[str, ...]]) -> pytest.MarkDecorator:
    """Every scenario of that sort a client has, at every profile."""
    return pytest.mark.parametrize(
        ("stack", "scenario", "profile"),
        [
            pytest.param(stack, scenario, profile, id=f"{stack}-{scenario}-{profile}")
            for stack in STACKS
            for scenario in of(stack)
            for profile in STEPS_MODES
        ],
    )


@in_every_way
def test_a_question_is_answered_once(
    stack: Stack, way: Way, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)[profile, f"question {way.name}"]["seen"]
    assert shown(seen, way) == shown(
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
        way,
    )


@in_every_way
def test_work_shows_its_answer_its_files_and_the_steps_asked_for(
    stack: Stack, way: Way, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)[profile, f"work {way.name}"]["seen"]
    if "thought" in way.shows:
        seen = {**seen, "thought": steps_in(seen["thought"])}
    # Open WebUI, for whom items are, would ask a stranger for the icon of each.
    cited = {} if profile == "items" and way.streams else FILES
    assert shown(seen, way) == shown(
        {
            "text": "Here: [table.csv](<table.csv>) and [dot.gif](<dot.gif>).",
            "finish": "stop",
            "calls": [],
            "thought": (THOUGHT, profile in way.thinks),
            "usage": [200, 40],
            "cited": cited,
            "pictures": [PICTURE],
            "files": FILES,
        },
        way,
    )


@in_every_way
def test_what_fails_is_raised_as_the_clients_own_error(
    stack: Stack, way: Way, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)
    raised = {fault: seen[profile, f"{fault} {way.name}"]["raised"] for fault in FAULTS}
    may_be = way.raises_at(profile)
    for fault, words in FAULTS.items():
        assert raised[fault]["kind"] in may_be[fault], fault
        assert words in raised[fault]["words"]


@each(lambda stack: stack.tools)
def test_a_clients_own_tool_is_called_between_ours_and_its_result_used(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    steps = seen_by(stack)[profile, scenario]["seen"]
    assert [(step["text"] or "", step["calls"]) for step in steps] == [
        ("", ["warmth"]),
        (WARMTH, []),
    ]


@each(lambda stack: stack.agents)
def test_an_agent_with_a_tool_comes_to_its_answer(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    assert seen_by(stack)[profile, scenario] == {"seen": WARMTH}


@each(lambda stack: ("hosted",) if stack.has_shell else ())
def test_a_hosted_shell_shows_its_calls_beside_those_of_the_clients_own_tool(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    steps = {
        "off": [],
        "reasoning": ["reasoning"],
        "items": ["shell_call", "shell_call_output"],
        "events": [],
    }
    assert seen_by(stack)[profile, scenario] == {"seen": [*steps[profile], "function_call"]}


@each(lambda stack: ("hosted",) if stack.shows_calls else ())
def test_a_hosted_shells_calls_are_not_taken_for_the_clients_to_make(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    ours = ["shell"] if profile == "items" else []
    assert seen_by(stack)[profile, scenario] == {
        "seen": {"tool-call": [*ours, "warmth"], "tool-result": [*ours, "warmth"], "tool-error": []}
    }


@each(lambda stack: stack.shapes)
def test_an_answer_keeps_to_the_form_that_was_asked_for(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    seen = seen_by(stack)[profile, scenario]["seen"]
    assert (seen if isinstance(seen, list) else [seen]) in ([PLACE], [PLACE, PLACE])


@each(lambda stack: ("models",) if stack.lists_models else ())
def test_every_model_is_listed_also_as_plain(
    stack: Stack, scenario: str, profile: StepsMode, seen_by: SeenBy
) -> None:
    assert seen_by(stack)[profile, scenario] == {"seen": [MODEL, f"{MODEL}:plain"]}


def shown(answer: dict[str, Any], way: Way) -> dict[str, Any]:
    """Of an answer what a client has a place for."""
    return {name: answer[name] for name in way.shows}


def steps_in(thought: str) -> tuple[str, bool]:
    """The model's own thinking, and whether the command follows it."""
    own, _, steps = thought.partition("\n")
    return own, steps.startswith(f"````console\n$ {COMMAND}\n")
