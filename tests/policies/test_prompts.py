"""The model is told the truth about its computer and about why the tools are gone."""

import pytest

from policies.answer_form import ANY_OBJECT, AnswerForm
from policies.egress import Egress
from policies.limits import Limits, StopReason
from policies.prompts import (
    FINAL_ANSWER,
    NUDGE,
    WHY_NO_MORE_TOOLS,
    final_request,
    form_request,
    system_prompt,
)
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.tools import make_tools


def test_it_names_the_directories() -> None:
    words = system_prompt(Limits())
    assert f"Working directory: {WORKING_DIR}." in words
    assert f"Files the user gave: {INPUT_DIR};" in words
    assert f"into {OUTPUT_DIR};" in words
    assert (WORKING_DIR, INPUT_DIR, OUTPUT_DIR) == (
        "/testbed",
        "/testbed/documents",
        "/testbed/output",
    )


@pytest.mark.parametrize(("timeout_s", "said"), [(120.0, "120 s"), (0.5, "0.5 s"), (7, "7 s")])
def test_it_tells_the_time_limit_in_force(timeout_s: float, said: str) -> None:
    words = system_prompt(Limits(command_timeout_s=timeout_s))
    assert f"one command may take {said}." in words


def test_it_names_every_tool() -> None:
    words = system_prompt(Limits())
    assert all(tool.name in words for tool in make_tools())


def test_it_says_that_there_is_no_network_and_that_the_shell_carries_over() -> None:
    words = system_prompt(Limits())
    assert "no network" in words
    assert "carry over" in words


def test_it_is_the_same_for_every_run_so_that_prefix_caches_hit() -> None:
    assert system_prompt(Limits()) == system_prompt(Limits(max_turns=3, wall_time_s=1))


@pytest.mark.parametrize("stop", list(WHY_NO_MORE_TOOLS))
def test_a_limit_is_named_when_the_answer_is_asked_for(stop: StopReason) -> None:
    assert final_request(stop) == f"{WHY_NO_MORE_TOOLS[stop]} {FINAL_ANSWER}"


@pytest.mark.parametrize("stop", [StopReason.SUBMITTED, StopReason.ANSWERED])
def test_a_run_that_reached_no_limit_is_not_told_of_one(stop: StopReason) -> None:
    assert final_request(stop) == FINAL_ANSWER


def test_the_form_of_the_answer_is_told_where_it_is_asked_for() -> None:
    assert final_request(StopReason.SUBMITTED, ANY_OBJECT) == (
        f"{FINAL_ANSWER} Answer with one JSON object and nothing else."
    )
    schema = AnswerForm({"type": "array"})
    assert final_request(StopReason.SUBMITTED, schema).endswith(
        'valid under this JSON Schema: {"type": "array"}'
    )
    assert "It is empty." in form_request("It is empty.", schema)


def test_every_limit_has_its_words() -> None:
    ended_by_the_model = {
        StopReason.SUBMITTED,
        StopReason.ANSWERED,
        StopReason.REFUSED,
        StopReason.CLIENT_TOOL_CALLS,
    }
    assert set(WHY_NO_MORE_TOOLS) == set(StopReason) - ended_by_the_model


def test_the_nudge_leaves_both_ways_open() -> None:
    assert "go on with the tools" in NUDGE
    assert "call submit" in NUDGE


def test_it_says_which_hosts_can_be_reached() -> None:
    assert "The sandbox has no network." in system_prompt(Limits())
    some = system_prompt(Limits(), Egress("allowlist", ("pypi", "example.org")))
    assert "reach these hosts: pypi, example.org; nothing else does" in some
    assert "reach public hosts; nothing" in system_prompt(Limits(), Egress("open"))
