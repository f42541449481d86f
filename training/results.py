"""The results of trainings on a CPU: the measured values, the checks of these values, and a summary
on disk and on the terminal.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.statistics import percentile
from training.curves import line_chart

MIN_GAIN = 0.4
"""The gain of the mean reward that counts as learning."""
LAST_STEPS = 5
"""Number of steps at the end of a training whose mean reward is compared with the first step's."""
MAX_LOGPROB_DIFFERENCE = 1e-4
"""The largest accepted difference between a captured log probability and the trainer's own."""


@dataclass(slots=True)
class TrainingMeasures:
    """The measured values of one training; those that are lists have a value for each step."""

    name: str
    is_control: bool = False
    """True for a training that must not learn."""
    captures_tokens: bool = True
    """True if the trainer gets the tokens from the proxy; False if it samples them itself."""
    reward: list[float] = field(default_factory=list)
    """The mean reward of the answers in each step, even if the training uses another reward."""
    tool_call_share: list[float] = field(default_factory=list)
    """The share of rollouts with a tool call in each step."""
    loss: list[float] = field(default_factory=list)
    splits: int = 0
    """Number of rollouts with more than one segment."""
    rollouts: int = 0
    unscorable: int = 0
    compared_tokens: int = 0
    p50_logprob_difference: float = 0.0
    """The median difference between a captured log probability and the model's own."""
    p99_logprob_difference: float = 0.0
    """The 99th percentile of these differences."""
    max_logprob_difference: float = 0.0
    """The largest of these differences."""
    weights_changed: bool = False
    seconds: float = 0.0

    def set_logprob_differences(self, differences: Sequence[float]) -> None:
        """Set the number of compared tokens and the percentiles of their differences."""
        self.compared_tokens = len(differences)
        if differences:
            self.p50_logprob_difference = percentile(differences, 0.5)
            self.p99_logprob_difference = percentile(differences, 0.99)
            self.max_logprob_difference = max(differences)


def gain(rewards: Sequence[float]) -> float:
    """Return the mean reward of the last steps minus that of the first step."""
    return fmean(rewards[-LAST_STEPS:]) - rewards[0]


def training_faults(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fault of a training: losses that are not finite, rollouts without a
    reward, and log probabilities that were not compared or differ from the trainer's own."""
    for each in results["trainings"]:
        if not each["loss"] or not all(map(math.isfinite, each["loss"])):
            yield f"{each['name']}: the losses of the steps are not finite: {each['loss']}"
        if each["unscorable"]:
            yield f"{each['name']}: {each['unscorable']} rollouts have no reward"
        if not each["captures_tokens"]:
            continue
        difference = each["max_logprob_difference"]
        if not each["compared_tokens"]:
            yield f"{each['name']}: no log probability was compared"
        elif not difference <= MAX_LOGPROB_DIFFERENCE:
            yield (
                f"{each['name']}: a captured log probability differs by {difference:.1e} from the"
                f" trainer's own; at most {MAX_LOGPROB_DIFFERENCE:.0e} is accepted"
            )


def learning_faults(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each training that did not learn, for each control that did, and for
    each training or control that left the weights unchanged."""
    for each in results["trainings"]:
        if not each["weights_changed"]:
            yield f"{each['name']}: the weights are the same as before"
        found = gain(each["reward"])
        if (found >= MIN_GAIN) == each["is_control"]:
            expected = "less than" if each["is_control"] else "at least"
            yield (
                f"{each['name']}: the mean reward of the last {LAST_STEPS} steps minus that of the"
                f" first step is {found:+.2f}; {expected} {MIN_GAIN} is expected"
            )


def write_results(results: Mapping[str, Any], out: Path) -> None:
    """Write results.json and reward.svg, the reward curves, to a folder, and print a summary."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    lines = {each["name"]: each["reward"] for each in results["trainings"]}
    picture = line_chart(lines, "Mean reward of a step", "step")
    (out / "reward.svg").write_text(picture, encoding="utf-8")
    for each in results["trainings"]:
        summary = (
            f"{each['name']}: {each['reward'][0]:.2f} -> {each['reward'][-1]:.2f} in"
            f" {len(each['reward'])} steps, {each['seconds']:.0f} s"
        )
        if each["captures_tokens"]:
            summary += (
                f"; {each['splits']} of {each['rollouts']} rollouts split; differences of the log"
                f" probabilities of {each['compared_tokens']} tokens:"
                f" p50 {each['p50_logprob_difference']:.1e},"
                f" p99 {each['p99_logprob_difference']:.1e},"
                f" max {each['max_logprob_difference']:.1e}"
            )
        print(summary)
    print(f"{results['seconds']:.0f} s in all; see {out}")
