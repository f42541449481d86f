"""The adapters for TRL's GRPOTrainer. With `rollout_func` the proxy runs the agent loop, and TRL
trains on its tokens:

    client = RolloutClient("http://127.0.0.1:8080/v1", "my-model")
    trainer = GRPOTrainer(
        model, reward_of_rollout, train_dataset=Dataset.from_list(prompts_of(rows)),
        rollout_func=rollout_func(client, rows), args=GRPOConfig(**PAPER_SETTINGS),
    )

With `environment_factory` TRL runs the loop, and the proxy runs the tool calls:

    with SandboxEnvironments(client, rows) as environments:
        trainer = GRPOTrainer(
            model, reward_of_environment, train_dataset=Dataset.from_list(environments.prompts()),
            environment_factory=environments, args=GRPOConfig(**PAPER_SETTINGS),
        )

Both arguments of TRL are experimental; the tests pin TRL 1.16.
"""

import asyncio
import statistics
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from training.rollouts import INFRA_ERROR, Rollout, RolloutClient, RolloutError, Segment
from training.rows import TaskRow
from training.turn_server import Message, TrainerRollout, TurnServer, text_of

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
penalty is in the rewards: a run that ends at a limit has not submitted an answer, so its reward is
0."""


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
        _require_usable_rollout(rollouts)
        _log_measures(rollouts, trainer)
        if observe:
            observe(rollouts)
        return trainer_columns(rollouts, trainer.processing_class.eos_token_id)

    return roll_out


def trainer_columns(rollouts: Sequence[Rollout], filler_token: int) -> dict[str, list[Any]]:
    """Return the columns that TRL expects, with one row for each rollout: its segment with the most
    sampled tokens. A rollout without segments gets the token `filler_token`, which is not trained
    on, and no reward."""
    empty = Segment([filler_token], [filler_token], [0], [0.0])
    taken = [max(each.segments, key=lambda s: s.sampled_count, default=empty) for each in rollouts]
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


def _require_usable_rollout(rollouts: Sequence[Rollout]) -> None:
    """Raise RolloutError if the infrastructure has spoilt all rollouts, so that a training without
    a proxy ends."""
    if rollouts and all(each.outcome == INFRA_ERROR for each in rollouts):
        raise RolloutError(f"All {len(rollouts)} rollouts of a step failed; the log says why.")


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
    mode = "train" if trainer.model.training else "eval"
    for name, value in measures.items():
        trainer._metrics[mode][f"rollouts/{name}"].append(value)  # noqa: SLF001 - no public way


# TRL runs the loop

RUN_ENDED_TEXT = "The run has ended."
"""The result of a tool call after the end of the run."""


class SandboxEnvironments:
    """The `environment_factory` of a GRPOTrainer, during a `with` block.

    The proxy sends the model calls of these runs to a server in this process, which answers with
    the tool calls that TRL makes. List `url` in the proxy's `backend.upstreams`. The trainer does
    not know the proxy's tools: their schemas are those of the methods of SandboxEnvironment.
    """

    def __init__(
        self,
        client: RolloutClient,
        rows: Iterable[TaskRow],
        *,
        host: str = "127.0.0.1",
        port: int = 8790,
        url: str = "",
    ) -> None:
        """`host` and `port` are the server's address, and `url` is its URL for the proxy, by
        default http://HOST:PORT/rollouts."""
        self._server = TurnServer(client, host=host, port=port, url=url)
        self._rows = {row.id: row for row in rows}
        self._batch_id = uuid.uuid4().hex
        self._batch = set[SandboxEnvironment]()
        """The environments that have begun a rollout in the current batch."""

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self._server.url

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    def __call__(self) -> "SandboxEnvironment":
        return SandboxEnvironment(self)

    def prompts(self) -> list[dict[str, Any]]:
        """Return the rows of the trainer's data set. A prompt has the proxy's system message, if
        there is one, and an empty user message, which `reset` completes. Starts one run, reads its
        system message and cancels the run. Raises RolloutError."""
        rollout = self._server.begin(next(iter(self._rows.values())), f"{self._batch_id}-prompt")
        messages = rollout.prompt()
        rollout.cancel()
        if not messages:
            raise RolloutError("The proxy began no run; the log says why.")
        system = [each for each in messages if each["role"] == "system"]
        prompt = [*system, {"role": "user", "content": ""}]
        return [{"prompt": prompt, "task_id": id} for id in self._rows]

    def begin(self, environment: "SandboxEnvironment", task_id: str) -> TrainerRollout:
        """Begin a rollout for an environment. TRL resets each environment once in a batch, so a
        second rollout of the same environment begins a new batch, with new group ids."""
        if environment in self._batch:
            self._batch_id = uuid.uuid4().hex
            self._batch.clear()
        self._batch.add(environment)
        return self._server.begin(self._rows[task_id], f"{self._batch_id}-{task_id}")

    def end(self, rollouts: Sequence[TrainerRollout], answers: Sequence[str]) -> list[Rollout]:
        """End the rollouts. Each answer is for the rollout at the same index, and is ignored if
        that rollout has ended. Raises RolloutError, also if the infrastructure has spoilt all
        rollouts."""
        ended = self._server.end_all(rollouts, answers)
        _require_usable_rollout(ended)
        return ended


class SandboxEnvironment:
    """The environment of one rollout at a time, which `reset` begins. TRL shows the other public
    methods to the model as tools. TRL hides errors of a tool from the trainer;
    `reward_of_environment` raises a RolloutError again."""

    def __init__(self, environments: SandboxEnvironments) -> None:
        self.environments = environments
        self.rollout: TrainerRollout | None = None
        """The rollout that the last `reset` began; None before the first `reset`."""

    def reset(self, task_id: str, **_: Any) -> str:
        """Begin a rollout of a task, and return the text of its user messages. A rollout that has
        not ended is cancelled. Raises RolloutError."""
        if self.rollout:
            self.rollout.cancel()
        self.rollout = self.environments.begin(self, task_id)
        messages = self.rollout.prompt()
        return "\n".join(text_of(each) for each in messages if each["role"] != "system")

    def execute_bash(
        self, command: str, timeout_s: int | None = None, job_id: str | None = None
    ) -> str:
        """Run a bash command in the sandbox and get its exit code and output.

        Args:
            command: The command, or the text to type into a job.
            timeout_s: The time in seconds after which the command is killed.
            job_id: The job of an earlier command that is still running.
        """
        return self._call("execute_bash", command=command, timeout_s=timeout_s, job_id=job_id)

    def str_replace_editor(
        self,
        command: str,
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        """View and edit files.

        Args:
            command: One of view, create, str_replace and insert.
            path: The path of a file or directory.
            file_text: create: The text of the file.
            old_str: str_replace: The text to replace, which must occur exactly once.
            new_str: str_replace, insert: The new text.
            insert_line: insert: The line after which the text is inserted; 0 for the start.
            view_range: view: The first and the last line; -1 for the end.
        """
        return self._call(
            "str_replace_editor",
            command=command,
            path=path,
            file_text=file_text,
            old_str=old_str,
            new_str=new_str,
            insert_line=insert_line,
            view_range=view_range,
        )

    def submit(self, answer: str | None = None) -> str:
        """End the work with the final answer.

        Args:
            answer: The answer. Without it, the answer is the text of the answer file.
        """
        return self._call("submit", answer=answer)

    def _call(self, tool: str, **arguments: Any) -> str:
        given = {name: value for name, value in arguments.items() if value is not None}
        observation = self.rollout.call_tool(tool, given) if self.rollout else None
        return RUN_ENDED_TEXT if observation is None else observation


def reward_of_environment(
    prompts: Sequence[Any],
    completions: Sequence[Sequence[Message]],
    environments: Sequence[SandboxEnvironment],
    **_: Any,
) -> list[float | None]:
    """Return the rewards of the rollouts of environments: the reward function for GRPOTrainer. The
    text of a completion's last message is the answer of a run without `submit`. The reward of a run
    that the infrastructure has spoilt is None. Raises RolloutError, also if all runs are spoilt."""
    rollouts = [each.rollout for each in environments if each.rollout]
    answers = [_last_text(completion) for completion in completions]
    ended = environments[0].environments.end(rollouts, answers)
    return [rollout.reward for rollout in ended]


def _last_text(completion: Sequence[Message]) -> str:
    """Return the text of the last message if the assistant wrote it and it calls no tool."""
    last = completion[-1] if completion else {}
    is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
    return text_of(last) if is_answer else ""
