"""The judgement on the results of the demonstration on a CPU."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from training.results import TrainingMeasures, learning_faults, training_faults, write_results

LEARNS = [0.2, 0.5, *[0.7] * 5]
STAYS = [0.2, 0.3, *[0.1] * 5]


def results(trained: list[float], control: list[float], **changes: Any) -> dict[str, Any]:
    """Return results with these rewards of the steps. The changes are those of the control."""
    values: dict[str, Any] = {
        "loss": [0.5],
        "compared_tokens": 9,
        "max_logprob_difference": 1e-5,
        "weights_changed": True,
    }
    first = TrainingMeasures("reward of the answer", reward=trained, **values)
    second = TrainingMeasures("random reward", True, reward=control, **{**values, **changes})
    return {"trainings": [asdict(first), asdict(second)]}


def test_training_check_passes_if_the_reward_rises_and_the_reward_of_the_control_does_not() -> None:
    found = results(LEARNS, STAYS)
    assert [*learning_faults(found), *training_faults(found)] == []


def test_training_check_reports_a_reward_that_rises_too_little() -> None:
    # A high reward in the middle does not count.
    (fault,) = learning_faults(results([0.2, 0.9, 0.9, *[0.5] * 5], STAYS))
    assert fault == (
        "reward of the answer: the mean reward of the last 5 steps minus that of the first step is"
        " +0.30; at least 0.4 is expected"
    )


def test_training_check_reports_a_control_with_random_rewards_that_learns() -> None:
    (fault,) = learning_faults(results(LEARNS, LEARNS))
    assert fault.startswith("random reward: ")
    assert fault.endswith("+0.50; less than 0.4 is expected")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"max_logprob_difference": 2e-4}, "differs by 2.0e-04"),
        ({"max_logprob_difference": float("nan")}, "differs by nan"),
        ({"compared_tokens": 0}, "no log probability was compared"),
        ({"loss": [0.5, float("inf")]}, "are not finite: [0.5, inf]"),
        ({"loss": []}, "are not finite: []"),
        ({"unscorable": 2}, "2 rollouts have no reward"),
    ],
)
def test_training_check_reports_wrong_log_probabilities_losses_and_missing_rewards(
    changes: dict[str, Any], fault: str
) -> None:
    (found,) = training_faults(results(LEARNS, STAYS, **changes))
    assert found.startswith("random reward: ")
    assert fault in found


def test_training_check_reports_a_training_that_does_not_change_the_model() -> None:
    (fault,) = learning_faults(results(LEARNS, STAYS, weights_changed=False))
    assert fault == "random reward: the weights are the same as before"


def test_training_check_compares_no_tokens_if_the_trainer_samples_them() -> None:
    assert [
        *training_faults(results(LEARNS, STAYS, captures_tokens=False, compared_tokens=0))
    ] == []


def test_training_summary_has_the_percentiles_of_the_logprob_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures = TrainingMeasures("reward of the answer", reward=[0.25, 0.75], splits=1, rollouts=8)
    measures.set_logprob_differences([number * 1e-7 for number in range(1, 201)])
    write_results({"trainings": [asdict(measures)], "seconds": 3.0}, tmp_path)
    printed = capsys.readouterr().out
    assert "0.25 -> 0.75 in 2 steps, 0 s; 1 of 8 rollouts split;" in printed
    assert "of 200 tokens: p50 1.0e-05, p99 2.0e-05, max 2.0e-05\n" in printed
    (stored,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["trainings"]
    assert stored == asdict(measures)
    assert [stored[f"{name}_logprob_difference"] for name in ("p50", "p99", "max")] == [
        pytest.approx(number * 1e-7) for number in (100, 198, 200)
    ]
    assert (tmp_path / "reward.svg").read_text(encoding="utf-8").startswith("<svg")
