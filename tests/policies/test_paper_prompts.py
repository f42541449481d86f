"""Prompts of the reference style, by default and from a user's templates."""

import pytest

from policies.paper_prompts import ReferencePrompts
from sandbox_runtime.tools import make_tools
from tests.fakes.paper import paper


def test_default_prompts_name_tools_and_directories_and_have_no_placeholder() -> None:
    prompts = ReferencePrompts()
    system = prompts.system_prompt()
    assert all(tool.name in system for tool in make_tools(paper()))
    assert all(path in system for path in ("/testbed\n", "/testbed/documents", "/testbed/output"))
    assert not {"{", "}"} & set(system + prompts.problem_message("x"))


def test_problem_text_is_inserted_into_the_prompt_unchanged() -> None:
    problem = 'What is {x}? {"a": {working_dir}}'
    assert f"<problem>\n{problem}\n</problem>" in ReferencePrompts().problem_message(problem)


def test_prompt_templates_are_filled_with_paths_and_the_problem_as_in_the_reference() -> None:
    prompts = ReferencePrompts(
        system="{command_docs}{demo}work {working_dir} in {input_dir}, {{braces}}",
        instance="{output_dir}/answer.txt: {problem_statement}",
        output_dir="/testbed",
    )
    assert prompts.system_prompt() == "work /testbed in /testbed/documents, {braces}"
    assert prompts.problem_message("2+2?") == "/testbed/answer.txt: 2+2?"


@pytest.mark.parametrize("template", ["{nobody}", "{", "{0}"])
def test_prompt_template_with_an_unknown_placeholder_is_an_error(template: str) -> None:
    with pytest.raises((KeyError, IndexError, ValueError)):
        ReferencePrompts(system=template).system_prompt()
