"""The adapter for TRL's GRPOTrainer: the proxy runs the agent loop, TRL trains on its tokens.

    client = RolloutClient("http://127.0.0.1:8080/v1", "my-model")
    trainer = GRPOTrainer(
        model, reward_of_rollout, train_dataset=Dataset.from_list(prompts_of(rows)),
        rollout_func=rollout_func(client, rows), args=GRPOConfig(**PAPER_SETTINGS),
    )

TRL's `rollout_func` is experimental; the tests pin TRL 1.16.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from training.rollouts import Rollout, RolloutClient, Segment
from training.rows import TaskRow

PAPER_SETTINGS: dict[str, Any] = {
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "scale_rewards": "none",
    "loss_type": "dr_grpo",
    "mask_truncated_completions": False,
    "num_generations": 8,
    "temperature": 1.0,
    "learning_rate": 1e-6,
}
"""The fields of GRPOConfig that correspond to the paper's GRPO++: a higher upper clip, no KL term,
no entropy term, and no division by the standard deviation. TRL subtracts the mean of a group; the
paper's leave-one-out baseline differs from it by the factor G / (G - 1) for groups of G. `dr_grpo`
divides by a constant length, so the paper's learning rate does not transfer exactly. The overlong
penalty is in the rewards: a run that ends at a limit did not submit."""


def prompts_of(rows: Iterable[TaskRow]) -> list[dict[str, str]]:
    """Return the rows of the trainer's data set. A prompt is the id of a task, because TRL gives
    `rollout_func` only the prompts."""
    return [{"prompt": row.id} for row in rows]


def rollout_func(
    client: RolloutClient,
    rows: Iterable[TaskRow],
    observe: Callable[[Sequence[Rollout]], None] | None = None,
) -> Callable[[Sequence[str], Any], dict[str, list[Any]]]:
    """Return a `rollout_func` for TRL, which runs the tasks whose ids are the prompts through a
    proxy. `observe` is called with the rollouts of each step, before the model is updated."""
    by_id = {row.id: row for row in rows}

    def roll_out(prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        rollouts = asyncio.run(client.run([by_id[prompt] for prompt in prompts]))
        _log_measures(rollouts, trainer)
        if observe:
            observe(rollouts)
        return trainer_rows(rollouts, trainer.processing_class.eos_token_id)

    return roll_out


def trainer_rows(rollouts: Sequence[Rollout], filler_token: int) -> dict[str, list[Any]]:
    """Return the columns that TRL expects, with one row for each rollout: its segment with the most
    sampled tokens. A rollout without segments gets the token `filler_token`, which is not trained
    on, and no reward."""
    empty = Segment([filler_token], [filler_token], [0], [0.0])
    taken = [max(each.segments, key=lambda s: s.sampled, default=empty) for each in rollouts]
    return {
        "prompt_ids": [each.prompt_ids for each in taken],
        "completion_ids": [each.response_ids for each in taken],
        "env_mask": [each.response_mask for each in taken],
        "logprobs": [each.logprobs for each in taken],
        "rollout_reward": [each.reward if each.segments else None for each in rollouts],
        "trajectory_id": [each.trajectory_id for each in rollouts],
    }


def reward_of_rollout(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout_reward: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """Return the rewards of the rollouts: the reward function for GRPOTrainer."""
    return list(rollout_reward)


def _log_measures(rollouts: Sequence[Rollout], trainer: Any) -> None:
    """Add the measures of a batch of rollouts to the trainer's log."""
    segments = [len(each.segments) for each in rollouts if each.segments]
    measures = {
        "split_rate": sum(number > 1 for number in segments) / max(1, len(segments)),
        "unscorable_rate": sum(each.reward is None for each in rollouts) / len(rollouts),
        "hardcoded_rate": sum(each.is_hardcoded for each in rollouts) / len(rollouts),
        "turns": statistics.mean(each.turns for each in rollouts),
        "tool_calls": statistics.mean(each.tool_calls for each in rollouts),
    }
    for name, value in measures.items():
        trainer._metrics["train"][f"rollouts/{name}"].append(value)  # noqa: SLF001 - no public way
