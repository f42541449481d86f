"""A real small model on a CPU: a short supervised start, then GRPO through a real proxy and real
sandboxes, for as many steps as fit in a time. `make train-small` runs it.

A task asks for a number that one command prints. The model must run the command and submit the
number. SmolLM2-135M-Instruct does neither by itself, so it first sees runs of a scripted policy.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.cpu_training import (
    Plan,
    measurement_conditions,
    prepare_process,
    scripted_traces,
    train_supervised,
    train_with_grpo,
)
from training.results import TrainingMeasures, write_results
from training.rewards import Attempt, Reward
from training.rows import TaskRow
from training.tiny_policy import (
    ANIMALS,
    CHAT_TEMPLATE,
    Message,
    call_message,
    reading_task,
)
from training.turn_server import text_of

TRACE_COUNT, SUPERVISED_STEPS, BATCH_SIZE = 64, 8, 8
"""Numbers of traces, of steps, and of traces in a step, in the supervised start. After this start,
the model still often runs a wrong command."""
SUPERVISED_LEARNING_RATE, LEARNING_RATE = 3e-4, 5e-5
TRAINED_LAYERS = 10
"""Number of layers that are trained: the last of 30. The others are frozen, to save time."""
COMPARED_ROLLOUTS = 4
"""Number of rollouts in a step whose log probabilities are compared. More would take long."""
PROMPTS_PER_STEP = 2
"""Number of tasks in one step of GRPO."""
MAX_TOKENS = 48
BATCH_WAIT_S = 0.5
"""Wait for each further request of a batch, in seconds. Generating a batch takes much longer."""
MAX_STEPS = 1000
COMMANDS = {
    "What is the first number in": "head -n 1",
    "What is the last number in": "tail -n 1",
    "How many numbers are in": "wc -l",
}
"""The beginnings of the questions, each with the command that prints the answer."""


def make_tasks(count: int, rng: random.Random) -> list[TaskRow]:
    """Return tasks with random numbers."""
    return [_make_task(rng) for _ in range(count)]


def _make_task(rng: random.Random) -> TaskRow:
    name = f"{rng.choice(ANIMALS)}.txt"
    numbers = [str(rng.randrange(100, 1000)) for _ in range(rng.randrange(2, 10))]
    beginning = rng.choice(list(COMMANDS))
    answer = {"head": numbers[0], "tail": numbers[-1], "wc": str(len(numbers))}
    text = "".join(f"{number}\n" for number in numbers)
    program = COMMANDS[beginning].partition(" ")[0]
    return reading_task(f"{beginning} {name}?", {name: text}, answer[program], "number")


def scripted_reply(messages: Sequence[Message]) -> Message:
    """Return the next message of a scripted policy, which runs the command of the question and
    submits the number that the command printed."""
    last = text_of(messages[-1])
    if messages[-1]["role"] != "user":
        printed = re.search(r"\[stdout\]\s*(\d+)", last)
        return call_message("submit", answer=printed[1] if printed else "0")
    asked = re.search(rf"({'|'.join(COMMANDS)}) (\w+\.txt)\?", last)
    assert asked, "a task has one of the questions"
    return call_message("execute_bash", command=f"{COMMANDS[asked[1]]} documents/{asked[2]}")


def score(row: TaskRow, attempt: Attempt) -> Reward:
    """Return 1 if the right number was submitted, else 0. A lost sandbox gives None."""
    if attempt.sandbox_lost:
        return Reward(None, "sandbox lost")
    is_right = attempt.submitted and attempt.answer.strip() == row.ground_truth
    return Reward(float(is_right), "function")


def run(model_path: Path, seed: int, sandbox: str, seconds: float) -> dict[str, Any]:
    """Train until `seconds` have passed since the call, and return the results."""
    began, rng = time.monotonic(), random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)
    traces = scripted_traces(make_tasks(TRACE_COUNT, rng), scripted_reply, score, sandbox)
    losses = train_supervised(
        model,
        tokenizer,
        traces,
        steps=SUPERVISED_STEPS,
        learning_rate=SUPERVISED_LEARNING_RATE,
        seed=seed,
        batch_size=BATCH_SIZE,
    )
    supervised_s = time.monotonic() - began
    measures = TrainingMeasures("reward of the answer")
    plan = Plan(
        tasks=make_tasks(MAX_STEPS * PROMPTS_PER_STEP, rng),
        prompts_per_step=PROMPTS_PER_STEP,
        score=score,
        learning_rate=LEARNING_RATE,
        max_tokens=MAX_TOKENS,
        batch_wait_s=BATCH_WAIT_S,
        compared_rollouts=COMPARED_ROLLOUTS,
        seed=seed,
        sandbox=sandbox,
        deadline_s=began + seconds,
    )
    train_with_grpo(model, tokenizer, measures, plan)
    return {
        **measurement_conditions(model, seed, sandbox),
        "supervised_loss": losses,
        "supervised_seconds": round(supervised_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        "trainings": [asdict(measures)],
    }


def main() -> int:
    """Run the command `python -m training.small_model`. Return the exit code."""
    parser = argparse.ArgumentParser(description="Train a small model through the proxy, on a CPU.")
    parser.add_argument("model", type=Path, help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("build/train-small"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sandbox", choices=["docker", "bubblewrap"], default="bubblewrap")
    parser.add_argument("--seconds", type=float, default=1800, help="no step begins later")
    arguments = parser.parse_args()
    prepare_process()
    found = run(arguments.model, arguments.seed, arguments.sandbox, arguments.seconds)
    write_results(found, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
