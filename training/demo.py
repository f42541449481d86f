"""A demonstration on a CPU: GRPO through a real proxy and real sandboxes teaches a tiny model to
read its files. `make train-demo` runs it.

1. A scripted policy answers tasks through the proxy; TRL's SFTTrainer trains on the export of its
   runs. Afterwards the model can search its files, but mostly guesses.
2. TRL's GRPOTrainer trains it on the rewards of its answers alone.
3. The same training with random rewards is the control.
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
    Measures,
    Plan,
    circumstances,
    prepare_process,
    reinforce,
    scripted_traces,
    supervise,
    write_results,
)
from training.tiny_policy import make_model, make_tasks, make_tokenizer, score, scripted_reply
from training.trl import reward_of_rollout

LEARNING_RATE = 3e-4
MAX_TOKENS = 64
READS = 0.25
"""The share of the `mixed` traces in which the scripted policy searches its files."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a demonstration."""

    readers: int
    """Number of traces of a policy that always searches its files."""
    mixed: int
    """Number of traces of a policy that mostly guesses."""
    steps_of_readers: int
    steps_of_mixed: int
    prompts: int
    """Number of tasks in one step of GRPO."""
    steps: int
    control_steps: int


FULL = Size(800, 600, 240, 80, 8, 20, 10)
QUICK = Size(128, 64, 100, 10, 2, 2, 1)
"""Too small to learn anything, but passes through all parts."""


def run(size: Size, seed: int, sandbox: str) -> dict[str, Any]:
    """Run the demonstration and return its results."""
    began, rng = time.monotonic(), random.Random(seed)
    readers, mixed = (
        scripted_traces(
            make_tasks(count, rng), partial(scripted_reply, rng=rng, reads=reads), score, sandbox
        )
        for count, reads in ((size.readers, 1.0), (size.mixed, READS))
    )
    lines = [*readers.splitlines()[:200], *mixed.splitlines()[:100]]
    tokenizer = make_tokenizer([json.loads(line)["messages"] for line in lines])
    model = make_model(tokenizer, seed)
    losses = supervise(
        model, tokenizer, readers, steps=size.steps_of_readers, learning_rate=2e-3, seed=seed
    )
    supervise(model, tokenizer, mixed, steps=size.steps_of_mixed, learning_rate=5e-4, seed=seed)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    coin = random.Random(seed)

    def random_reward(prompts: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(coin.random() < 0.5) for _ in prompts]

    for name, steps, reward in (
        ("reward of the answer", size.steps, reward_of_rollout),
        ("random reward", size.control_steps, random_reward),
    ):
        model.load_state_dict(start)
        measures = Measures(name)
        plan = Plan(
            tasks=make_tasks(steps * size.prompts, random.Random(f"{seed} {name}")),
            prompts=size.prompts,
            score=score,
            reward=reward,
            learning_rate=LEARNING_RATE,
            max_tokens=MAX_TOKENS,
            seed=seed,
            sandbox=sandbox,
        )
        reinforce(model, tokenizer, measures, plan)
        results.append(measures)
    return {
        **circumstances(model, seed, sandbox),
        "supervised_loss": losses,
        "seconds": round(time.monotonic() - began, 1),
        "trainings": [asdict(each) for each in results],
    }


def main() -> int:
    """Run the command `python -m training.demo`. Return the exit code."""
    parser = argparse.ArgumentParser(description="Train a tiny model through the proxy, on a CPU.")
    parser.add_argument("--out", type=Path, default=Path("build/train-demo"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sandbox", choices=["docker", "bubblewrap"], default="bubblewrap")
    parser.add_argument("--quick", action="store_true", help="a minute; learns nothing")
    arguments = parser.parse_args()
    prepare_process()
    found = run(QUICK if arguments.quick else FULL, arguments.seed, arguments.sandbox)
    write_results(found, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
