"""Train a tiny model for a step in TRL's loop, whose tool calls a real proxy runs, and print the
measures.

The model first learns to search its files from a policy that always does.
"""

import json
import random
import sys
from dataclasses import asdict
from functools import partial

from training.cpu_training import (
    Plan,
    TrainingMeasures,
    prepare_process,
    scripted_traces,
    train_in_environments,
    train_supervised,
)
from training.tiny_policy import make_model, make_tasks, make_tokenizer, score, scripted_reply
from training.trl import reward_of_environment

SEED, SANDBOX = 1, "bubblewrap"


def main() -> int:
    prepare_process()
    rng = random.Random(SEED)
    reply = partial(scripted_reply, rng=rng, search_share=1.0)
    traces = scripted_traces(make_tasks(128, rng), reply, score, SANDBOX)
    tokenizer = make_tokenizer([json.loads(line)["messages"] for line in traces.splitlines()])
    model = make_model(tokenizer, SEED)
    train_supervised(model, tokenizer, traces, steps=60, learning_rate=2e-3, seed=SEED)
    measures = TrainingMeasures("TRL's loop")
    plan = Plan(
        tasks=make_tasks(2, rng),
        prompts_per_step=2,
        score=score,
        reward=reward_of_environment,
        learning_rate=3e-4,
        max_tokens=64,
        seed=SEED,
        sandbox=SANDBOX,
    )
    train_in_environments(model, tokenizer, measures, plan)
    sys.stdout.write(json.dumps(asdict(measures)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
