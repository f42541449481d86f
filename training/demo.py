"""A demonstration on a CPU: GRPO through a real proxy and real sandboxes teaches a tiny model to
read its files. `make train-demo` runs it.

1. A scripted policy answers tasks through the proxy; TRL's SFTTrainer trains on the export of its
   runs. Afterwards the model can search its files, but mostly guesses.
2. TRL's GRPOTrainer trains it on the rewards of its answers alone.
3. The same training with random rewards is the control.
4. GRPOTrainer trains it again, now with TRL's own loop of generation and tool calls.

The command fails if the training of step 2 or 4 does not learn, or if the control does.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training.cpu_training import (
    Plan,
    measurement_conditions,
    prepare_process,
    scripted_traces,
    train_in_environments,
    train_supervised,
    train_with_grpo,
)
from training.results import TrainingMeasures, learning_faults, training_faults, write_results
from training.tiny_policy import make_model, make_tasks, make_tokenizer, score, scripted_reply
from training.trl import reward_of_environment, reward_of_rollout

LEARNING_RATE = 3e-4
MAX_TOKENS = 64
SEARCH_SHARE = 0.25
"""The share of the `mixed_traces` in which the scripted policy searches its files."""


@dataclass(frozen=True, slots=True)
class DemoSize:
    """The size of a demonstration."""

    reader_traces: int
    """Number of traces of a policy that always searches its files."""
    mixed_traces: int
    """Number of traces of a policy that mostly guesses."""
    reader_steps: int
    mixed_steps: int
    prompts_per_step: int
    """Number of tasks in one step of GRPO."""
    grpo_steps: int
    control_steps: int
    environment_steps: int
    """Number of steps of the training in TRL's loop."""


FULL_SIZE = DemoSize(800, 600, 240, 80, 8, 20, 20, 20)
QUICK_SIZE = DemoSize(128, 64, 100, 10, 2, 2, 1, 1)
"""A size with which the model learns nothing, but the demonstration passes through all its
parts."""


def run(size: DemoSize, seed: int, sandbox: str) -> dict[str, Any]:
    """Run the demonstration and return its results."""
    began, rng = time.monotonic(), random.Random(seed)
    readers, mixed = (
        scripted_traces(
            make_tasks(count, rng),
            partial(scripted_reply, rng=rng, search_share=reads),
            score,
            sandbox,
        )
        for count, reads in ((size.reader_traces, 1.0), (size.mixed_traces, SEARCH_SHARE))
    )
    lines = [*readers.splitlines()[:200], *mixed.splitlines()[:100]]
    tokenizer = make_tokenizer([json.loads(line)["messages"] for line in lines])
    model = make_model(tokenizer, seed)
    losses = train_supervised(
        model, tokenizer, readers, steps=size.reader_steps, learning_rate=2e-3, seed=seed
    )
    train_supervised(model, tokenizer, mixed, steps=size.mixed_steps, learning_rate=5e-4, seed=seed)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    coin = random.Random(seed)

    def random_reward(prompts: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(coin.random() < 0.5) for _ in prompts]

    for measures, steps, reward, train in (
        (
            TrainingMeasures("reward of the answer"),
            size.grpo_steps,
            reward_of_rollout,
            train_with_grpo,
        ),
        (
            TrainingMeasures("random reward", is_control=True),
            size.control_steps,
            random_reward,
            train_with_grpo,
        ),
        (
            TrainingMeasures("TRL's loop", captures_tokens=False),
            size.environment_steps,
            reward_of_environment,
            train_in_environments,
        ),
    ):
        model.load_state_dict(start)
        task_rng = random.Random(f"{seed} {measures.name}")
        plan = Plan(
            tasks=make_tasks(steps * size.prompts_per_step, task_rng),
            prompts_per_step=size.prompts_per_step,
            score=score,
            reward=reward,
            learning_rate=LEARNING_RATE,
            max_tokens=MAX_TOKENS,
            seed=seed,
            sandbox=sandbox,
        )
        train(model, tokenizer, measures, plan)
        results.append(measures)
    return {
        **measurement_conditions(model, seed, sandbox),
        "supervised_loss": losses,
        "seconds": round(time.monotonic() - began, 1),
        "trainings": [asdict(each) for each in results],
    }


def main() -> int:
    """Run the command `python -m training.demo`. Return the exit code: 1 if the results do not show
    what the demonstration claims."""
    parser = argparse.ArgumentParser(description="Train a tiny model through the proxy, on a CPU.")
    parser.add_argument("--out", type=Path, default=Path("build/train-demo"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sandbox", choices=["docker", "bubblewrap"], default="bubblewrap")
    parser.add_argument("--quick", action="store_true", help="a minute; learns nothing")
    arguments = parser.parse_args()
    prepare_process()
    found = run(QUICK_SIZE if arguments.quick else FULL_SIZE, arguments.seed, arguments.sandbox)
    write_results(found, arguments.out)
    faults = [*training_faults(found), *([] if arguments.quick else learning_faults(found))]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
