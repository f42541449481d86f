"""Exports of trajectories are accepted by the packages of the trainers that read them."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.clients.chat_http import http_client, post_chat
from tests.clients.test_trajectory_export import ALLOWED, ANSWER, CAPTURE, STEP, exported
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.training.trainer_packages import trainer_packages

VALIDATE = Path(__file__).parent / "trainers" / "validate_openenv.py"
AGENT_LOOP = "verl/experimental/agent_loop/agent_loop.py"


@pytest.fixture(scope="module")
def packages() -> Path:
    return trainer_packages()


async def lines(state_dir: Path, format: str) -> list[dict[str, Any]]:
    """Return the export of a run with two calls, whose tokens do not continue."""
    async with (
        scripted_backend(
            [{**STEP, "reasoning": "I run echo."}, ANSWER], has_tokens=True
        ) as backend,
        running_proxy(backend, "memory", state_dir, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        await post_chat(http, **CAPTURE)
        return await exported(http, format)


def validated(packages: Path, traces: list[Any]) -> subprocess.CompletedProcess[bytes]:
    text = "\n".join(map(json.dumps, traces)).encode()
    command = [sys.executable, str(VALIDATE), str(packages)]
    return subprocess.run(command, input=text, capture_output=True, timeout=60, check=False)


async def test_openenv_accepts_an_exported_trace(packages: Path, tmp_path: Path) -> None:
    (line,) = await lines(tmp_path, "openenv")
    ended = await anyio.to_thread.run_sync(validated, packages, [line["trace"]])
    assert (ended.returncode, ended.stdout) == (0, b"2\n"), ended.stderr


async def test_openenv_refuses_a_mask_that_is_too_short(packages: Path, tmp_path: Path) -> None:
    (line,) = await lines(tmp_path, "openenv")
    line["trace"]["turns"][0]["loss_mask"].pop()
    ended = await anyio.to_thread.run_sync(validated, packages, [line["trace"]])
    assert ended.returncode != 0
    assert b"length_mismatch" in ended.stderr


async def test_exported_rows_have_the_fields_of_verls_agent_loop_output(
    packages: Path, tmp_path: Path
) -> None:
    """verl's module imports ray and torch, so its class is read, not imported."""
    source = ast.parse((packages / AGENT_LOOP).read_text())
    (output,) = (
        node
        for node in source.body
        if isinstance(node, ast.ClassDef) and node.name == "AgentLoopOutput"
    )
    fields = [node for node in output.body if isinstance(node, ast.AnnAssign)]
    required = {ast.unparse(field.target) for field in fields if field.value is None}
    for row in await lines(tmp_path, "verl"):
        assert required <= row.keys() <= {ast.unparse(field.target) for field in fields}
