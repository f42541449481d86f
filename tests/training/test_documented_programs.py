"""The training programs in the documentation, up to the first use of TRL."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from training.__main__ import main
from training.rollouts import RolloutClient

PAGE = Path(__file__).resolve().parents[2] / "docs/research/train.md"
PROGRAMS = [
    program
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if "trainer.train()" in program
]


def test_training_manual_has_a_program_for_each_adapter() -> None:
    assert ["rollout_func=" in each for each in PROGRAMS] == [True, False]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_the_training_manual_reads_its_tasks_and_makes_a_client(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--kind", "synthetic", "--out", "tasks", "--seed", "7"]
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", "build", "20", *options]) == 0
    found = dict[str, Any]()
    for node in ast.parse(program).body:
        is_import = isinstance(node, ast.ImportFrom)
        if is_import and node.module in {"datasets", "trl"}:
            continue
        if not is_import and not isinstance(node, ast.Assign):
            break
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "trainer":
            break
        exec(compile(ast.Module([node], []), str(PAGE), "exec"), found)
    assert isinstance(found["client"], RolloutClient)
    assert found["rows"]
