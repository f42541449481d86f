"""Converted tasks are read by the data sets of the trainers' own packages."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.training.install_trl import run_python
from tests.training.trainer_packages import trainer_packages
from training.__main__ import main

READ = Path(__file__).parent / "trainers" / "read_tasks.py"
REWARD_MANAGER = "verl/experimental/reward_loop/reward_manager/naive.py"
"""verl's module that reads a row's right answer for a reward function."""
GATEWAY = "agentlightning/llm_proxy.py"
GATEWAY_PATH = "/rollout/17/attempt/1"
"""The path in the recipe of docs/research/train.md, before `/v1`."""


@pytest.fixture(scope="module")
def packages() -> Path:
    return trainer_packages()


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Tasks in the format of verl."""
    tasks, out = tmp_path / "tasks", tmp_path / "tasks.jsonl"
    assert (
        main(["tasks", "build", "6", "--kind", "synthetic", "--out", str(tasks), "--seed", "7"])
        == 0
    )
    assert main(["tasks", "convert", str(tasks), "--to", "verl", "--out", str(out)]) == 0
    return out


async def read(packages: Path, file: Path) -> Any:
    output = await anyio.to_thread.run_sync(run_python, str(READ), str(packages), str(file))
    return json.loads(output.splitlines()[-1])


async def test_verl_and_agent_lightning_read_converted_tasks(
    packages: Path, converted: Path
) -> None:
    lines = [json.loads(line) for line in converted.read_text(encoding="utf-8").splitlines()]
    found = await read(packages, converted)
    assert len(lines) == 6
    added = {"tools_kwargs": {}, "interaction_kwargs": {}}
    assert found["verl"] == [
        {**line, "raw_prompt": line["prompt"], "index": number, **added}
        for number, line in enumerate(lines)
    ]
    assert found["verl batch"] == {
        name: [row[name] for row in found["verl"]] for name in found["verl"][0]
    }
    assert found["agentlightning"] == [
        {**line, "index": number} for number, line in enumerate(lines)
    ]


async def test_verl_leaves_out_a_row_without_messages(packages: Path, converted: Path) -> None:
    first, *others = converted.read_text(encoding="utf-8").splitlines()
    broken = {**json.loads(first), "prompt": []}
    converted.write_text("\n".join([json.dumps(broken), *others]), encoding="utf-8")
    found = await read(packages, converted)
    assert [row["index"] for row in found["verl"]] == [1, 2, 3, 4, 5]


def test_converted_tasks_have_the_columns_that_verls_reward_manager_requires(
    packages: Path, converted: Path
) -> None:
    """verl's module imports ray, so its class is read, not imported."""
    source = ast.parse((packages / REWARD_MANAGER).read_text(encoding="utf-8"))
    required = {
        ast.unparse(node).partition("non_tensor_batch")[2]
        for node in ast.walk(source)
        if isinstance(node, ast.Subscript) and "non_tensor_batch[" in ast.unparse(node)
    }
    assert required == {"['data_source']", "['reward_model']", "['reward_model']['ground_truth']"}
    for line in converted.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert isinstance(row["data_source"], str)
        assert isinstance(row["reward_model"]["ground_truth"], str)


def test_agent_lightning_gateway_reads_rollout_and_attempt_from_the_documented_path(
    packages: Path,
) -> None:
    """The gateway's module imports litellm's proxy, so the test reads the pattern in its source."""
    source = ast.parse((packages / GATEWAY).read_text(encoding="utf-8"))
    (pattern,) = (
        node.args[0].value
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "re.match"
        and isinstance(node.args[0], ast.Constant)
        and "rollout" in str(node.args[0].value)
    )
    found = re.match(str(pattern), f"{GATEWAY_PATH}/v1/chat/completions")
    assert found is not None
    assert found.groups() == ("17", "1", "/v1/chat/completions")
    page = Path(__file__).parents[2] / "docs/research/train.md"
    assert f"`{GATEWAY_PATH}/v1`" in page.read_text(encoding="utf-8")
