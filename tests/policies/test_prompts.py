"""Prompts: the description of the sandbox, and the request for a final answer."""

import json

import pytest

from policies.answer_form import ANY_OBJECT, AnswerForm
from policies.egress import Egress
from policies.isolation import Isolation
from policies.limits import Limits, StopReason
from policies.profile import Profile
from policies.prompts import (
    FINAL_ANSWER,
    NUDGE,
    WHY_NO_MORE_TOOLS,
    SandboxContents,
    corrected_answer_request,
    final_answer_request,
    system_prompt,
)
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.images import MODULES, PROGRAMS
from sandbox_runtime.tools import make_tools


def tool_description(name: str) -> str:
    """Return the description of a tool."""
    (schema,) = (tool.schema for tool in make_tools() if tool.name == name)
    return str(schema["function"]["description"])


def test_system_prompt_names_the_directories() -> None:
    prompt = system_prompt()
    assert f"Working directory: {WORKING_DIR}." in prompt
    assert f"Files the user gave: {INPUT_DIR}." in prompt
    assert f"into {OUTPUT_DIR}; nothing else is kept" in prompt
    assert (WORKING_DIR, INPUT_DIR, OUTPUT_DIR) == (
        "/testbed",
        "/testbed/documents",
        "/testbed/output",
    )


@pytest.mark.parametrize(("timeout_s", "text"), [(120.0, "120 s"), (0.5, "0.5 s"), (7, "7 s")])
def test_system_prompt_states_the_command_timeout(timeout_s: float, text: str) -> None:
    prompt = system_prompt(Profile(limits=Limits(command_timeout_s=timeout_s)))
    assert f"A command is stopped after {text}, or" in prompt


def test_system_prompt_names_every_tool() -> None:
    prompt = system_prompt()
    assert all(tool.name in prompt for tool in make_tools())


def test_prompts_say_that_there_is_no_network_and_that_shell_state_persists() -> None:
    assert "no network" in system_prompt()
    assert "carry over" in tool_description("execute_bash")


def test_system_prompt_and_tool_schemas_are_short_for_any_sandbox_contents() -> None:
    everything = SandboxContents(
        (*PROGRAMS, *MODULES, *(f"module{number}" for number in range(1000)))
    )
    prompt = system_prompt(Profile(), everything)
    schemas = json.dumps([tool.schema for tool in make_tools()])
    # At 3.5 characters per token, plus 50 tokens of the chat template, at most 800 tokens.
    assert len(prompt) + len(schemas) <= 2620


def test_name_and_description_of_a_profile_do_not_change_the_system_prompt() -> None:
    assert system_prompt() == system_prompt(Profile(name="other", about="Whatever."))


def test_prompt_style_selects_the_instruction_on_using_the_sandbox() -> None:
    neutral = system_prompt(Profile(prompt="neutral"))
    strict = system_prompt(Profile(prompt="compute_first"))
    assert "answer simple things directly" in neutral
    assert "Derive every answer with it" in strict
    assert neutral.split("\n")[1:] == strict.split("\n")[1:]
    assert system_prompt(Profile(prompt="none")) == ""


def test_system_prompt_lists_only_software_that_is_not_in_every_sandbox() -> None:
    assert "Installed: git, numpy." in system_prompt(contents=SandboxContents(("git", "numpy")))
    assert "Installed" not in system_prompt()
    assert "Installed: git." in system_prompt(contents=SandboxContents(("bash", "git", "tar")))
    assert "Installed" not in system_prompt(contents=SandboxContents(("bash", "tar")))
    assert "/testbed/shared" in system_prompt(contents=SandboxContents(has_shared_files=True))
    assert "/testbed/shared" not in system_prompt()


@pytest.mark.parametrize("stop", list(WHY_NO_MORE_TOOLS))
def test_request_for_the_final_answer_names_the_reached_limit(stop: StopReason) -> None:
    assert final_answer_request(stop) == f"{WHY_NO_MORE_TOOLS[stop]} {FINAL_ANSWER}"


@pytest.mark.parametrize("stop", [StopReason.SUBMITTED, StopReason.ANSWERED])
def test_request_for_the_final_answer_names_no_limit_if_none_was_reached(stop: StopReason) -> None:
    assert final_answer_request(stop) == FINAL_ANSWER


def test_request_for_the_final_answer_states_the_required_form() -> None:
    assert final_answer_request(StopReason.SUBMITTED, ANY_OBJECT) == (
        f"{FINAL_ANSWER} Answer with one JSON object and nothing else."
    )
    schema = AnswerForm({"type": "array"})
    assert final_answer_request(StopReason.SUBMITTED, schema).endswith(
        'valid under this JSON Schema: {"type": "array"}'
    )
    assert "It is empty." in corrected_answer_request("It is empty.", schema)


def test_every_stop_reason_not_caused_by_the_model_has_a_sentence_for_the_model() -> None:
    ended_by_the_model = {
        StopReason.SUBMITTED,
        StopReason.ANSWERED,
        StopReason.REFUSED,
        StopReason.CLIENT_TOOL_CALLS,
    }
    assert set(WHY_NO_MORE_TOOLS) == set(StopReason) - ended_by_the_model


def test_message_after_a_turn_without_a_tool_call_asks_for_tool_calls_or_submit() -> None:
    assert "go on with the tools" in NUDGE
    assert "call submit" in NUDGE


def test_system_prompt_lists_allowed_hosts() -> None:
    def prompt_with_network(egress: Egress) -> str:
        return system_prompt(Profile(isolation=Isolation(network=egress)))

    assert "The sandbox has no network." in prompt_with_network(Egress())
    prompt = prompt_with_network(Egress("allowlist", ("npm", "example.org")))
    hosts = "registry.npmjs.org, registry.yarnpkg.com, example.org"
    assert f"reach these hosts: {hosts}; nothing else does" in prompt
    assert "reach public hosts; nothing" in prompt_with_network(Egress("open"))
