"""`paper.prompts: reference` reads the texts of the real reference package."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import parse
from proxy.paper_prompts import REFERENCE_FILES
from proxy.profiles import build_profiles
from tests.clients.stacks.environments import variables
from tests.reference.environment import python

TEXTS = """
import json, pathlib, llm_in_sandbox
from llm_in_sandbox.observation import CONTINUE_MSG
from llm_in_sandbox.tools import execute_bash_tool, str_replace_editor_tool, submit_tool
print(json.dumps({
    "package": str(pathlib.Path(llm_in_sandbox.__file__).parent),
    "continue_message": CONTINUE_MSG,
    "tools": [str_replace_editor_tool, execute_bash_tool, submit_tool],
}))
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the package's folder and constants, as its own interpreter sees them."""
    home = tmp_path_factory.mktemp("home")
    output = subprocess.run(
        [python(), "-c", TEXTS],
        check=True,
        capture_output=True,
        timeout=300,
        cwd=home,
        env=variables(home),
    ).stdout
    texts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return texts


def test_paper_profiles_have_the_prompts_and_tools_of_the_reference_package(
    reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(reference["package"])
    (tmp_path / package.name).symlink_to(package)
    monkeypatch.syspath_prepend(tmp_path)
    named = build_profiles(parse({"paper": {"prompts": "reference"}}, "c.yaml")).by_name
    for domain, name in REFERENCE_FILES.items():
        file = yaml.safe_load((package / name).read_text(encoding="utf-8"))
        prompts = named["paper" if domain == "general" else f"paper-{domain}"].agent.prompts
        assert prompts.system == file["system_prompt"]
        assert prompts.instance == file["instance_prompt"]
        assert prompts.output_dir == file["output_dir"]
        assert prompts.no_call == reference["continue_message"]
        assert list(prompts.tools) == reference["tools"]
