"""TRL trains through a real proxy and real sandboxes, too shortly to learn anything."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.training.install_trl import run_python

TRAIN_ENVIRONMENT = Path(__file__).parent / "trainers" / "train_environment.py"
SAVE_TINY_MODEL = """
import sys
from training.tiny_policy import make_model, make_tokenizer

tokenizer = make_tokenizer([[{"role": "user", "content": "What is the first number in fox.txt?"}]])
make_model(tokenizer, seed=1).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The results of `python -m training.demo --quick`."""
    out = tmp_path_factory.mktemp("demo")
    run_python("-m", "training.demo", "--quick", "--out", str(out))
    assert (out / "reward.svg").read_text(encoding="utf-8").startswith("<svg")
    found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return found


def test_trainer_trains_on_every_rollout(results: Mapping[str, Any]) -> None:
    rollouts = {each["name"]: each["rollouts"] for each in results["trainings"]}
    assert rollouts == {"reward of the answer": 32, "random reward": 16, "TRL's loop": 16}
    assert [each["unscorable"] for each in results["trainings"]] == [0, 0, 0]


def test_trl_training_has_finite_losses_and_changes_the_weights(results: Mapping[str, Any]) -> None:
    for training in results["trainings"]:
        assert training["loss"]
        assert all(map(math.isfinite, training["loss"]))
    assert results["trainings"][1]["weights_changed"]


def test_captured_log_probabilities_are_those_of_the_trainer(results: Mapping[str, Any]) -> None:
    *captured, _ = results["trainings"]
    for training in captured:
        assert training["compared_tokens"] >= training["rollouts"]
        assert (
            training["p50_logprob_difference"]
            <= training["p99_logprob_difference"]
            <= training["max_logprob_difference"]
            <= 1e-4
        )


def test_at_most_half_of_the_training_rollouts_have_several_token_segments(
    results: Mapping[str, Any],
) -> None:
    for training in results["trainings"]:
        assert training["splits"] <= training["rollouts"] / 2


def test_small_model_program_trains_a_tiny_model(tmp_path: Path) -> None:
    model, out = str(tmp_path / "model"), tmp_path / "out"
    run_python("-c", SAVE_TINY_MODEL, model)
    run_python("-m", "training.small_model", model, "--seconds", "0", "--out", str(out))
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    (training,) = found["trainings"]
    assert all(map(math.isfinite, [*found["supervised_loss"], *training["loss"]]))
    assert (len(training["reward"]), training["rollouts"], training["unscorable"]) == (1, 16, 0)
    assert training["max_logprob_difference"] <= 1e-4


def test_environments_run_the_tool_calls_of_trls_loop() -> None:
    found = json.loads(run_python(str(TRAIN_ENVIRONMENT)).splitlines()[-1])
    assert (found["rollouts"], found["unscorable"]) == (16, 0)
    assert found["tool_call_share"][0] > 0.5
    assert all(map(math.isfinite, found["loss"]))
