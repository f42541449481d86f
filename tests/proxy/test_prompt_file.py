"""Prompt files in the format of the reference implementation, and their errors."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.paper_prompts import NO_CALL
from policies.prompts import TOOL_NAMES
from proxy.config import ConfigError, parse
from proxy.paper_prompts import read_prompt_file, read_reference_prompts
from proxy.profiles import build_profiles
from sandbox_runtime.tools import make_tools
from tests.fakes.paper import paper

FILE = {
    "dataset": "somewhere/else",
    "system_prompt": "In {working_dir}, from {input_dir} to {output_dir}.",
    "instance_prompt": "{problem_statement}!",
    "working_dir": "/testbed",
    "input_dir": "/testbed/input",
    "output_dir": "/testbed",
}
TOOLS = [tool.schema for tool in make_tools(paper())]


def write_file(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "prompts.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), "utf-8")
    return path


def test_prompt_file_replaces_the_prompts_of_the_paper_profile(tmp_path: Path) -> None:
    tree = {"paper": {"prompt_file": str(write_file(tmp_path, FILE))}}
    agent = build_profiles(parse(tree, "c.yaml")).by_name["paper"].agent
    assert agent.style == "reference"
    assert agent.prompts.system_prompt() == "In /testbed, from /testbed/documents to /testbed."
    assert agent.prompts.problem_message("x") == "x!"
    assert agent.prompts.no_call == NO_CALL


def test_continue_message_and_tools_of_a_prompt_file_are_used(tmp_path: Path) -> None:
    with_description = [
        {**tool, "function": {**tool["function"], "description": "D"}} for tool in TOOLS
    ]
    file = {**FILE, "continue_message": "\nGo on.\n", "tools": with_description}
    prompts = read_prompt_file(write_file(tmp_path, file))
    assert prompts.no_call == "\nGo on.\n"
    assert [tool.schema for tool in make_tools(paper(prompts))] == with_description


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a list", "it is not a YAML object"),
        ("", "it is not a YAML object"),
        ("a: [", "while parsing"),
        ({**FILE, "system_prompt": None}, "system_prompt: Input should be a valid string"),
        ({"system_prompt": "x"}, "instance_prompt: Field required"),
        ({**FILE, "system_prompt": "{nobody}"}, "unknown placeholder 'nobody'"),
        ({**FILE, "instance_prompt": "{problem_statement.x}"}, "unknown placeholder"),
        ({**FILE, "instance_prompt": "{"}, "Single '{' encountered"),
        ({**FILE, "output_dir": "/out"}, "answers are only read from /testbed/output and /testbed"),
        (
            {**FILE, "tools": TOOLS[:2]},
            "the tools must be str_replace_editor, execute_bash, submit",
        ),
        (
            {**FILE, "tools": [{}, {}, {}]},
            "the tools must be str_replace_editor, execute_bash, submit",
        ),
    ],
)
def test_error_in_a_prompt_file_is_one_line_that_names_the_file(
    tmp_path: Path, content: Any, message: str
) -> None:
    path = write_file(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_prompt_file(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_error_for_a_missing_prompt_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_prompt_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tools.py": "import no_such_module"}, "No module named 'no_such_module'"),
        ({"tools.py": "undefined"}, "name 'undefined' is not defined"),
        ({"tools.py": "raise RuntimeError('two\\nlines')"}, "two lines"),
        ({"tools.py": "def"}, "invalid syntax"),
        ({"observation.py": ""}, "observation.py has no CONTINUE_MSG"),
        ({"config/general.yaml": "- a list"}, "it is not a YAML object"),
    ],
)
def test_error_of_the_reference_package_is_one_line(
    files: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_in_sandbox"
    tools = "\n".join(f"{name}_tool = {{}}" for name in TOOL_NAMES)
    usual = {"__init__.py": "", "observation.py": "CONTINUE_MSG = 'Go on.'", "tools.py": tools}
    for name, content in {**usual, **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        read_reference_prompts()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
