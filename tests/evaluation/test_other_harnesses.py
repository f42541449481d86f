"""lm-eval and inspect_ai, pointed at the proxy, give the scores of sandbox-eval.

Their environments have hundreds of MiB: INSTALL_LARGE_STACKS=1 installs them into .stacks.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from evaluation.grading import ResultGrader
from evaluation.results import MODES, Mode, read_results
from evaluation.samples import Suite
from evaluation.scripted import MODEL_NAME, ScriptedModel, serve_model
from evaluation.self_check import MAX_TURNS, run_arguments
from tests.clients.stacks.environments import python_of, variables
from tests.e2e import proxy_process
from tests.evaluation.evaluation_process import sandbox_eval, synthetic_suite
from tests.evaluation.harnesses.export import export_to_inspect, export_to_lm_eval, tasks_of

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

COUNT = 12
"""Samples of each domain: several of each kind."""
SANDBOX = {"enabled": "always", "limits": {"max_turns": MAX_TURNS}}
TASKS = Path(__file__).parent / "harnesses" / "inspect_tasks.py"
TIMEOUT_S = 300
URL = "http://the-proxy/v1"
Scores = Mapping[str, float]
"""The score of each sample, by its id."""


@dataclass(frozen=True)
class Evaluated:
    """A suite, and the scores of its samples without input files by sandbox-eval."""

    suite: Suite
    scores: Mapping[Mode, Scores]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return anyio.run(evaluate, tmp_path_factory.mktemp("evaluated"))


async def evaluate(home: Path) -> Evaluated:
    suite = await synthetic_suite(home / "data", COUNT)
    async with (
        serve_model(ScriptedModel(suite.samples).reply) as model_url,
        proxy_process.serving(home, "bubblewrap", model_url) as server,
    ):
        arguments = run_arguments(home / "output", home / "data", f"{server.url}/v1")
        ended = await sandbox_eval(*arguments, "--suites", "synthetic")
    assert ended.returncode == 0, ended.stderr
    exported = {sample.id for group in tasks_of(suite.samples).values() for sample in group}
    scores: dict[Mode, dict[str, float]] = {mode: {} for mode in MODES}
    for each in ResultGrader(home).grade_results([suite], read_results(home / "output")):
        if each.sample.id in exported:
            assert each.grade is not None
            scores[each.result.mode][each.sample.id] = float(each.grade.score)
    return Evaluated(suite, scores)


def model_name(mode: Mode) -> str:
    return f"{MODEL_NAME}:plain" if mode == "plain" else MODEL_NAME


async def run_harness(
    python: Path, home: Path, suite: Suite, commands: Sequence[Sequence[str]], **settings: str
) -> None:
    """Run commands of a harness one after the other, with a proxy before the scripted model. URL in
    an argument stands for the proxy's URL, with /v1."""
    async with (
        serve_model(ScriptedModel(suite.samples).reply) as model_url,
        proxy_process.serving(home, "bubblewrap", model_url) as server,
    ):
        for arguments in commands:
            environment = {
                **variables(home),
                "SBX_BASE_URL": f"{server.url}/v1",
                "SBX_API_KEY": "none",
                "OPENAI_API_KEY": "none",
                **settings,
            }
            command = [str(python), *(each.replace(URL, f"{server.url}/v1") for each in arguments)]
            with anyio.fail_after(TIMEOUT_S):
                ended = await anyio.run_process(
                    command, check=False, cwd=home, env=environment, stderr=subprocess.STDOUT
                )
            assert ended.returncode == 0, ended.stdout.decode()[-3000:]


@pytest.mark.parametrize("mode", MODES)
async def test_lm_eval_gives_the_scores_of_sandbox_eval(
    mode: Mode, evaluated: Evaluated, tmp_path: Path
) -> None:
    python = python_of("lm-eval")
    sandbox = SANDBOX if mode == "sandbox" else None
    tasks = export_to_lm_eval(evaluated.suite.samples, tmp_path, sandbox)
    model = f"model={model_name(mode)},base_url={URL}/chat/completions,num_concurrent=4"
    arguments = [
        *("-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", model),
        *("--tasks", ",".join(tasks), "--include_path", str(tmp_path), "--apply_chat_template"),
        *("--output_path", str(tmp_path / "results"), "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    await run_harness(python, tmp_path, evaluated.suite, [arguments], **offline)
    assert lm_eval_scores(tmp_path / "results") == evaluated.scores[mode]


def lm_eval_scores(results: Path) -> dict[str, float]:
    lines = [
        json.loads(line)
        for path in results.rglob("samples_*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return {line["doc"]["id"]: float(line["exact_match"]) for line in lines}


@pytest.mark.parametrize("mode", MODES)
async def test_inspect_gives_the_scores_of_sandbox_eval(
    mode: Mode, evaluated: Evaluated, tmp_path: Path
) -> None:
    python = python_of("inspect-ai")
    extra = ["--extra-body", json.dumps({"sandbox": SANDBOX})] if mode == "sandbox" else []
    commands = [
        [
            *("-m", "inspect_ai", "eval", f"{TASKS}@exported"),
            *("-T", f"folder={tmp_path}", "-T", f"name={name}"),
            *("--model", f"openai-api/sbx/{model_name(mode)}", "--log-format", "json"),
            *("--log-dir", str(tmp_path / "logs"), "--display", "none"),
            *extra,
        ]
        for name in export_to_inspect(evaluated.suite.samples, tmp_path)
    ]
    await run_harness(python, tmp_path, evaluated.suite, commands)
    assert inspect_scores(tmp_path / "logs") == evaluated.scores[mode]


def inspect_scores(logs: Path) -> dict[str, float]:
    samples: list[dict[str, Any]] = [
        sample
        for path in logs.glob("*.json")
        for sample in json.loads(path.read_text(encoding="utf-8"))["samples"]
    ]
    values = {"C": 1.0, "I": 0.0}
    return {each["id"]: values[each["scores"]["pattern"]["value"]] for each in samples}


def test_sandbox_eval_scores_include_right_and_wrong_answers_in_both_modes(
    evaluated: Evaluated,
) -> None:
    """The comparison would show nothing if all scores were equal."""
    for mode in MODES:
        assert {0.0, 1.0} == set(evaluated.scores[mode].values())
    assert len(evaluated.scores["plain"]) == 2 * COUNT  # computation and formats
    assert evaluated.scores["plain"] != evaluated.scores["sandbox"]
