"""Training on a CPU through a real proxy and real sandboxes: the parts that `training.demo` and
`training.small_model` share.

`scripted_traces` captures the runs of a scripted policy, `train_supervised` trains on their export
with TRL's SFTTrainer, and `train_with_grpo` trains with TRL's GRPOTrainer on the rewards of
rollouts.
"""

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset, load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from training.policy_server import PolicyServer
from training.results import TrainingMeasures
from training.rollouts import Rollout, RolloutClient, Score, Segment
from training.rows import TaskRow
from training.trl import (
    PAPER_SETTINGS,
    SandboxEnvironment,
    SandboxEnvironments,
    prompts_of,
    reward_of_rollout,
    rollout_func,
)
from training.turn_server import completion_of

ROOT = Path(__file__).resolve().parent.parent
GENERATIONS = PAPER_SETTINGS["num_generations"]
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 60.0
TRAINER_SETTINGS: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
"""Fields of TRL's configurations: training in fp32 on a CPU, without writing files."""
Reply = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""A function that returns the next message of a scripted policy after the messages so far."""


def prepare_process() -> None:
    """Set the signal handler, the environment and the threads that a training command needs."""
    # SIGTERM raises KeyboardInterrupt, so that `run_proxy` ends its server process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # With two threads on two cores, the proxy and torch wait for each other.
    torch.set_num_threads(1)


@contextmanager
def run_proxy(backend_url: str, sandbox: str, upstreams: Sequence[str] = ()) -> Iterator[str]:
    """Run a proxy in front of the policy, and yield its base URL. Requests may name the URLs in
    `upstreams` in place of `backend_url`."""
    with tempfile.TemporaryDirectory() as directory:
        limits = {"max_turns": 3, "final_question": False}
        profile = {"prompt": "none", "agent": {"capture_tokens": True}, "limits": limits}
        config = {
            "server": {"data_dir": directory},
            "backend": {"base_url": backend_url, "upstreams": list(upstreams)},
            "sandbox": {"backend": sandbox, "pool": {"min_ready": 8, "max_sandboxes": 64}},
            "profiles": {"default": profile},
        }
        file, log = Path(directory, "config.yaml"), Path(directory, "log")
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", "0"]
        with log.open("wb") as output:
            server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            yield f"{_proxy_url(server, log)}/v1"
        finally:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _proxy_url(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the proxy serves, and return its URL without `/v1`. Raises RuntimeError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        _, found, rest = log.read_text(encoding="utf-8").partition("serving at ")
        if found and "/v1" in rest:
            return rest.partition("/v1")[0]
        time.sleep(0.1)
    raise RuntimeError(f"the proxy did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


# The supervised start


class _ScriptedServer(PolicyServer):
    """Serves a scripted policy."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(None, None)
        self._reply = reply

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return completion_of(dict(self._reply(body["messages"])), "stop", self.name)


def scripted_traces(tasks: Sequence[TaskRow], reply: Reply, score: Score, sandbox: str) -> str:
    """Run a scripted policy through the proxy, and return the export of its runs in the format
    `sft`."""
    with _ScriptedServer(reply) as server, run_proxy(server.base_url, sandbox) as url:
        client = RolloutClient(url, server.name, score=score, sandbox={"capture": "messages"})
        asyncio.run(client.run(tasks))
        found = httpx.get(f"{url}/trajectories/export", params={"format": "sft"}, timeout=60)
    found.raise_for_status()
    return found.text


def train_supervised(
    model: Any,
    tokenizer: Any,
    export: str,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    batch_size: int = 16,
) -> list[float]:
    """Train the model on an export in the format `sft`, and return the loss of each step. The loss
    counts only the assistant's tokens; the tokenizer's chat template must mark them."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "traces.jsonl")
        file.write_text(export, encoding="utf-8")
        # Dataset.from_list would give each tool the parameters of all tools.
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=directory)
        config = SFTConfig(
            **TRAINER_SETTINGS,
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=min(10, steps // 4),
            assistant_only_loss=True,
            seed=seed,
        )
        trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    return _losses(trainer)


# GRPO


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one training with GRPO."""

    tasks: Sequence[TaskRow]
    """The tasks of all steps; each is run GENERATIONS times."""
    prompts_per_step: int
    """Number of tasks in one step."""
    score: Score
    reward: Callable[..., list[float | None]] = reward_of_rollout
    """The reward function for GRPOTrainer."""
    learning_rate: float
    max_tokens: int
    """Maximum tokens of one reply."""
    batch_wait_s: float = 0.02
    """Time in seconds that the policy server waits for each further request of a batch."""
    seed: int
    sandbox: str
    compared_rollouts: int | None = None
    """Number of rollouts of a step whose log probabilities the model computes again. None: all of
    them."""
    deadline_s: float | None = None
    """The `time.monotonic()` time after which no step begins. None: the steps use all tasks."""


class _Deadline(TrainerCallback):
    """Ends a training after the first step that ends later than `deadline_s`."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= time.monotonic() >= self._deadline_s


def train_with_grpo(model: Any, tokenizer: Any, measures: TrainingMeasures, plan: Plan) -> None:
    """Train the model with GRPO, and fill in the measures."""
    began, before = time.monotonic(), _weight_fingerprint(model)
    torch.manual_seed(plan.seed)
    batch = GENERATIONS * plan.prompts_per_step
    differences = list[float]()
    with (
        PolicyServer(model, tokenizer, batch_wait_s=plan.batch_wait_s) as server,
        run_proxy(server.base_url, plan.sandbox) as url,
        tempfile.TemporaryDirectory() as directory,
    ):
        parameters = {"max_tokens": plan.max_tokens, "temperature": 1.0}
        client = RolloutClient(
            url, server.name, score=plan.score, parameters=parameters, concurrency=batch
        )

        def observe(rollouts: Sequence[Rollout]) -> None:
            _add_measures(measures, rollouts)
            for rollout in rollouts[: plan.compared_rollouts]:
                for segment in rollout.segments:
                    differences.extend(logprob_differences(model, segment))

        trainer = GRPOTrainer(
            model,
            plan.reward,
            args=_grpo_config(plan, directory),
            train_dataset=Dataset.from_list(prompts_of(plan.tasks)),
            processing_class=tokenizer,
            rollout_func=rollout_func(client, plan.tasks, observe),
            callbacks=[] if plan.deadline_s is None else [_Deadline(plan.deadline_s)],
        )
        trainer.train()
    measures.set_logprob_differences(differences)
    measures.loss = _losses(trainer)
    measures.weights_changed = _weight_fingerprint(model) != before
    measures.seconds = round(time.monotonic() - began, 1)


def train_in_environments(
    model: Any, tokenizer: Any, measures: TrainingMeasures, plan: Plan
) -> None:
    """Train the model with GRPO, and fill in the measures. TRL runs the agent loop, and the proxy
    runs the tool calls. The proxy's only backend is the server of the environments."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    began, before = time.monotonic(), _weight_fingerprint(model)
    torch.manual_seed(plan.seed)
    turns_url = f"http://127.0.0.1:{port}"
    with (
        run_proxy(f"{turns_url}/v1", plan.sandbox, [f"{turns_url}/rollouts"]) as url,
        tempfile.TemporaryDirectory() as directory,
        SandboxEnvironments(
            RolloutClient(url, "policy", score=plan.score), plan.tasks, port=port
        ) as factory,
    ):

        def reward(environments: Sequence[SandboxEnvironment], **fields: Any) -> Any:
            rewards = plan.reward(environments=environments, **fields)
            rollouts = [each.rollout for each in environments if each.rollout]
            _add_measures(measures, factory.end(rollouts, [""] * len(rollouts)))
            return rewards

        trainer = GRPOTrainer(
            model,
            reward,
            args=_grpo_config(plan, directory),
            train_dataset=Dataset.from_list(factory.prompts()),
            processing_class=tokenizer,
            environment_factory=factory,
        )
        trainer.train()
    measures.loss = _losses(trainer)
    measures.weights_changed = _weight_fingerprint(model) != before
    measures.seconds = round(time.monotonic() - began, 1)


def _grpo_config(plan: Plan, directory: str) -> GRPOConfig:
    return GRPOConfig(
        **{**PAPER_SETTINGS, **TRAINER_SETTINGS, "learning_rate": plan.learning_rate},
        output_dir=directory,
        max_steps=len(plan.tasks) // plan.prompts_per_step,
        per_device_train_batch_size=GENERATIONS * plan.prompts_per_step,
        max_completion_length=256,
        lr_scheduler_type="constant",
        seed=plan.seed,
    )


def _add_measures(measures: TrainingMeasures, rollouts: Sequence[Rollout]) -> None:
    rewards = [each.reward for each in rollouts if each.reward is not None]
    measures.reward.append(round(sum(rewards) / max(1, len(rewards)), 4))
    measures.tool_call_share.append(
        round(sum(each.tool_calls > 0 for each in rollouts) / len(rollouts), 4)
    )
    measures.rollouts += len(rollouts)
    measures.unscorable += len(rollouts) - len(rewards)
    measures.splits += sum(len(each.segments) > 1 for each in rollouts)
    print(
        f"{measures.name}: step {len(measures.reward)}, reward {measures.reward[-1]:.2f},"
        f" {measures.tool_call_share[-1]:.0%} used a tool",
        flush=True,
    )


@torch.inference_mode()
def logprob_differences(model: Any, segment: Segment) -> list[float]:
    """Return the absolute difference, for each sampled token, between the captured log probability
    and the log probability that the model computes now."""
    ids = torch.tensor([[*segment.prompt_ids, *segment.response_ids]])
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    own = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(segment.prompt_ids) - 1 :]
    pairs = zip(own.tolist(), segment.logprobs, segment.response_mask, strict=True)
    return [abs(one - other) for one, other, is_sampled in pairs if is_sampled]


def _weight_fingerprint(model: Any) -> float:
    return float(sum(each.double().abs().sum().item() for each in model.parameters()))


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measurement_conditions(model: Any, seed: int, sandbox: str) -> dict[str, Any]:
    """Return the conditions of a measurement: seed, sandbox, machine and size of the model."""
    return {
        "seed": seed,
        "sandbox": sandbox,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "parameters": sum(each.numel() for each in model.parameters()),
    }
