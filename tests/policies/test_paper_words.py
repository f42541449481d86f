"""What the paper's manner says beside observations: ours, or the reference's if supplied."""

import pytest

from policies.reference_style import ReferencePrompts
from sandbox_runtime.tools import make_tools
from tests.fakes.paper import paper


def test_our_words_name_tools_and_directories_and_leave_no_placeholder() -> None:
    words = ReferencePrompts()
    system = words.system_prompt()
    assert all(tool.name in system for tool in make_tools(paper()))
    assert all(path in system for path in ("/testbed\n", "/testbed/documents", "/testbed/output"))
    assert not {"{", "}"} & set(system + words.problem("x"))


def test_the_problem_is_told_as_it_is() -> None:
    problem = 'What is {x}? {"a": {working_dir}}'
    assert f"<problem>\n{problem}\n</problem>" in ReferencePrompts().problem(problem)


def test_a_users_templates_are_filled_as_the_reference_fills_them() -> None:
    words = ReferencePrompts(
        system="{command_docs}{demo}work {working_dir} in {input_dir}, {{braces}}",
        instance="{output_dir}/answer.txt: {problem_statement}",
        output_dir="/testbed",
    )
    assert words.system_prompt() == "work /testbed in /testbed/documents, {braces}"
    assert words.problem("2+2?") == "/testbed/answer.txt: 2+2?"


@pytest.mark.parametrize("template", ["{nobody}", "{", "{0}"])
def test_a_placeholder_that_nobody_fills_is_an_error(template: str) -> None:
    with pytest.raises((KeyError, IndexError, ValueError)):
        ReferencePrompts(system=template).system_prompt()
