"""Exports of trajectories for trainers. Each function in `EXPORTS` takes a trajectory in the native
format and yields one object for each line of the export. It yields nothing if the trajectory lacks
data that the format needs.

Model calls are merged into rows as they are merged into token segments (`TrajectoryWriter`): a call
whose prompt begins with all tokens of the previous call continues the row of that call. Any other
call begins a new row. All rows of a trajectory have the same reward.
"""

from collections.abc import Callable, Iterator, Mapping

from policies.sessions import TrajectoryExportFormat
from proxy.schemas.trajectory import INFRA_ERROR, Object, last_call_messages


def reward_of(trajectory: Object) -> float | None:
    """Return the value of the last reward. Return None if the trajectory has no reward or no
    result, or if its outcome is INFRA_ERROR."""
    if trajectory["result"] is None or trajectory["outcome"] == INFRA_ERROR:
        return None
    rewards = trajectory["rewards"]
    return rewards[-1]["value"] if rewards else None


def token_rows(trajectory: Object) -> Iterator[Object]:
    """Yield a row for each token segment, with the labels and the reward of the trajectory."""
    segments = trajectory["token_segments"]
    for index, segment in enumerate(segments):
        yield {
            **_labels(trajectory),
            "segment": index,
            "segments": len(segments),
            "model_calls": _call_count(trajectory, index),
            **segment,
            "reward": reward_of(trajectory),
        }


def verl_rows(trajectory: Object) -> Iterator[Object]:
    """Yield the rows with the field names of verl's AgentLoopOutput
    (verl/experimental/agent_loop)."""
    for row in token_rows(trajectory):
        yield {
            "prompt_ids": row["prompt_ids"],
            "response_ids": row["response_ids"],
            "response_mask": row["response_mask"],
            "response_logprobs": row["logprobs"],
            "reward_score": row["reward"],
            "num_turns": 2 * row["model_calls"],  # the replies, and the message before each
            "metrics": {},
            "extra_fields": {
                name: row[name] for name in (*_labels(trajectory), "segment", "segments")
            },
        }


def openenv_trace(trajectory: Object) -> Iterator[Object]:
    """Yield the trajectory with its calls as OpenEnv's TrainingTrace, schema version 1
    (openenv/core/harness/training.py). Only the sampled tokens of a turn are trained on."""
    turns = list(_openenv_turns(trajectory))
    if turns:
        trace = {"schema_version": 1, "turns": turns}
        yield {**_labels(trajectory), "reward": reward_of(trajectory), "trace": trace}


def _openenv_turns(trajectory: Object) -> Iterator[Object]:
    for index, call in enumerate(trajectory["model_calls"]):
        if call.get("token_segment") is None:
            continue
        segment = trajectory["token_segments"][call["token_segment"]]
        first, prompt = len(segment["prompt_ids"]), call["prompt_tokens"]
        sampled = slice(prompt - first, prompt - first + call["reply_tokens"])
        yield {
            "node_id": f"{trajectory['id']}:{index}",
            "prompt_token_ids": [*segment["prompt_ids"], *segment["response_ids"][: sampled.start]],
            "completion_token_ids": segment["response_ids"][sampled],
            "per_token_logps": segment["logprobs"][sampled],
            "loss_mask": [0] * prompt + segment["response_mask"][sampled],
            "request": trajectory["settings"][call["settings"]],
            "response": trajectory["messages"][call["reply"]],
            "metadata": {
                "turn": call["turn"],
                "finish_reason": call["finish_reason"],
                "weight_version": call["weight_version"],
            },
        }


def sft_messages(trajectory: Object) -> Iterator[Object]:
    """Yield the messages and tools of a run's last model call that has a reply, for supervised
    training. The model's reply is the last message: tool results after it, such as the result of
    `submit`, are left out, because the model did not write them. Yield nothing for a run without a
    result or with an infrastructure error."""
    if trajectory["result"] is None or trajectory["outcome"] == INFRA_ERROR:
        return
    if found := last_call_messages(trajectory):
        messages, tools = found
        yield {
            **_labels(trajectory),
            "messages": messages,
            "tools": tools or [],
            "reward": reward_of(trajectory),
        }


def native_trajectory(trajectory: Object) -> Iterator[Object]:
    """Yield the trajectory itself."""
    yield trajectory


EXPORTS: Mapping[TrajectoryExportFormat, Callable[[Object], Iterator[Object]]] = {
    "rows": token_rows,
    "verl": verl_rows,
    "openenv": openenv_trace,
    "sft": sft_messages,
    "native": native_trajectory,
}


def _labels(trajectory: Object) -> Object:
    return {
        "trajectory_id": trajectory["id"],
        "group_id": trajectory["group_id"],
        "task_id": trajectory["task_id"],
        "session_id": trajectory["session_id"],
        "outcome": trajectory["outcome"],
    }


def _call_count(trajectory: Object, segment: int) -> int:
    """Return the number of model calls whose tokens are in a segment."""
    return sum(call.get("token_segment") == segment for call in trajectory["model_calls"])
