"""A demonstration on a CPU: GRPO through a real proxy and real sandboxes teaches a tiny model to
read its files. `make train-demo` runs it.

1. A scripted policy answers tasks through the proxy; its exported messages are the first training
   data. Afterwards the model can search its files, but mostly guesses.
2. TRL trains it with GRPO on the rewards of its answers alone.
3. The same training with random rewards is the control.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from training.curves import curves
from training.policy_server import PolicyServer, completion_of
from training.rollouts import Rollout, RolloutClient
from training.rows import TaskRow
from training.tiny_policy import (
    fine_tune,
    make_model,
    make_tasks,
    make_tokenizer,
    score,
    scripted_reply,
)
from training.trl import PAPER_SETTINGS, prompts_of, reward_of_rollout, rollout_func

ROOT = Path(__file__).resolve().parent.parent
GENERATIONS = PAPER_SETTINGS["num_generations"]
LEARNING_RATE = 3e-4
MAX_TOKENS = 64
READS = 0.25
"""The share of runs with a search in the last supervised traces."""
START_S, STOP_S = 60.0, 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a demonstration."""

    readers: int
    """Traces of a policy that reads."""
    mixed: int
    """Traces of a policy that mostly guesses."""
    steps_of_readers: int
    steps_of_mixed: int
    prompts: int
    """Tasks of one step of GRPO; each is run GENERATIONS times."""
    steps: int
    control_steps: int


FULL = Size(800, 600, 240, 80, 8, 20, 10)
QUICK = Size(128, 64, 100, 10, 2, 2, 1)
"""Too small to learn anything, but passes through all parts."""


@dataclass(slots=True)
class Measures:
    """The measures of one training."""

    name: str
    reward: list[float] = field(default_factory=list)
    """The mean true reward of each step."""
    reads: list[float] = field(default_factory=list)
    """The share of rollouts with a tool call, of each step."""
    loss: list[float] = field(default_factory=list)
    splits: int = 0
    """Rollouts whose tokens are more than one segment."""
    rollouts: int = 0
    unscorable: int = 0
    trained_tokens: int = 0
    max_logprob_difference: float = 0.0
    """The largest difference between a captured log probability and the trainer's own."""
    weights_changed: bool = False
    seconds: float = 0.0


@contextmanager
def proxy(backend_url: str, sandbox: str) -> Iterator[str]:
    """Run a proxy in front of the policy, and yield its base URL."""
    with tempfile.TemporaryDirectory() as directory:
        limits = {"max_turns": 3, "final_question": False}
        profile = {"prompt": "none", "agent": {"capture_tokens": True}, "limits": limits}
        config = {
            "server": {"data_dir": directory},
            "backend": {"base_url": backend_url},
            "sandbox": {"backend": sandbox, "pool": {"min_ready": 8}},
            "profiles": {"default": profile},
        }
        file, log = Path(directory, "config.yaml"), Path(directory, "log")
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", "0"]
        with log.open("wb") as output:
            server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            yield f"{_address(server, log)}/v1"
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait for the server and return its address. Raises RuntimeError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        _, found, rest = log.read_text(encoding="utf-8").partition("serving at ")
        if found and "/v1" in rest:
            return rest.partition("/v1")[0]
        time.sleep(0.1)
    raise RuntimeError(f"the proxy did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


class _ScriptedServer(PolicyServer):
    """Serves the scripted policy."""

    def __init__(self, rng: random.Random, reads: float) -> None:
        super().__init__(None, None)
        self._rng, self._reads = rng, reads

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        message = scripted_reply(body["messages"], self._rng, self._reads)
        return completion_of(dict(message), "stop", self.name)


def scripted_traces(
    tasks: Sequence[TaskRow], reads: float, rng: random.Random, sandbox: str
) -> list[list[dict[str, Any]]]:
    """Run the scripted policy through the proxy, and return the exported messages."""
    with _ScriptedServer(rng, reads) as server, proxy(server.base_url, sandbox) as url:
        client = RolloutClient(url, server.name, score=score, sandbox={"capture": "messages"})
        asyncio.run(client.run(tasks))
        found = httpx.get(f"{url}/trajectories/export", params={"format": "sft"}, timeout=60)
    return [json.loads(line)["messages"] for line in found.text.splitlines()]


def train(
    model: Any,
    tokenizer: Any,
    measures: Measures,
    *,
    tasks: Sequence[TaskRow],
    steps: int,
    seed: int,
    sandbox: str,
    reward: Callable[..., list[float | None]],
    directory: str,
) -> None:
    """Train the model with GRPO on the rewards that `reward` returns, and fill in the measures.
    `directory` is for the trainer's files."""
    began, before = time.monotonic(), _fingerprint(model)
    torch.manual_seed(seed)
    batch = GENERATIONS * len(tasks) // steps
    config = GRPOConfig(
        **{**PAPER_SETTINGS, "learning_rate": LEARNING_RATE},
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=batch,
        max_completion_length=256,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )
    with PolicyServer(model, tokenizer) as server, proxy(server.base_url, sandbox) as url:
        parameters = {"max_tokens": MAX_TOKENS, "temperature": 1.0}
        client = RolloutClient(
            url, server.name, score=score, parameters=parameters, concurrency=batch
        )

        def observe(rollouts: Sequence[Rollout]) -> None:
            _measure(measures, rollouts, model)

        trainer = GRPOTrainer(
            model,
            reward,
            args=config,
            train_dataset=Dataset.from_list(prompts_of(tasks)),
            processing_class=tokenizer,
            rollout_func=rollout_func(client, tasks, observe),
        )
        trainer.train()
    measures.loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    measures.weights_changed = _fingerprint(model) != before
    measures.seconds = round(time.monotonic() - began, 1)


def _measure(measures: Measures, rollouts: Sequence[Rollout], model: Any) -> None:
    rewards = [each.reward for each in rollouts if each.reward is not None]
    measures.reward.append(round(sum(rewards) / max(1, len(rewards)), 4))
    measures.reads.append(round(sum(each.tool_calls > 0 for each in rollouts) / len(rollouts), 4))
    measures.rollouts += len(rollouts)
    measures.unscorable += len(rollouts) - len(rewards)
    measures.splits += sum(len(each.segments) > 1 for each in rollouts)
    for rollout in rollouts:
        for segment in rollout.segments:
            difference = logprob_difference(model, segment)
            measures.trained_tokens += segment.sampled
            measures.max_logprob_difference = max(measures.max_logprob_difference, difference)
    print(
        f"{measures.name}: step {len(measures.reward)}, reward {measures.reward[-1]:.2f},"
        f" {measures.reads[-1]:.0%} read",
        flush=True,
    )


@torch.inference_mode()
def logprob_difference(model: Any, segment: Any) -> float:
    """Return the largest difference between a captured log probability of a sampled token and the
    one that the model computes now."""
    ids = torch.tensor([[*segment.prompt_ids, *segment.response_ids]])
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    own = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(segment.prompt_ids) - 1 :]
    pairs = zip(own.tolist(), segment.logprobs, segment.response_mask, strict=True)
    return max((abs(one - other) for one, other, is_sampled in pairs if is_sampled), default=0.0)


def _fingerprint(model: Any) -> float:
    return float(sum(each.double().abs().sum().item() for each in model.parameters()))


def run(size: Size, seed: int, sandbox: str) -> dict[str, Any]:
    """Run the demonstration and return its results."""
    began, rng = time.monotonic(), random.Random(seed)
    readers = scripted_traces(make_tasks(size.readers, rng), 1.0, rng, sandbox)
    mixed = scripted_traces(make_tasks(size.mixed, rng), READS, rng, sandbox)
    tokenizer = make_tokenizer([*readers[:200], *mixed[:100]])
    model = make_model(tokenizer, seed)
    steps = size.steps_of_readers
    loss = fine_tune(model, tokenizer, readers, steps=steps, rng=rng, learning_rate=2e-3)
    fine_tune(model, tokenizer, mixed, steps=size.steps_of_mixed, rng=rng, learning_rate=5e-4)
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
        tasks = make_tasks(steps * size.prompts, random.Random(f"{seed} {name}"))
        with tempfile.TemporaryDirectory() as directory:
            train(
                model,
                tokenizer,
                measures,
                tasks=tasks,
                steps=steps,
                seed=seed,
                sandbox=sandbox,
                reward=reward,
                directory=directory,
            )
        results.append(measures)
    return {
        "seed": seed,
        "sandbox": sandbox,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "parameters": sum(each.numel() for each in model.parameters()),
        "supervised_loss": round(loss, 4),
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the proxy must not remain
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # With two threads on two cores, the proxy and torch wait for each other.
    torch.set_num_threads(1)
    found = run(QUICK if arguments.quick else FULL, arguments.seed, arguments.sandbox)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (arguments.out / "reward.svg").write_text(
        curves(
            {each["name"]: each["reward"] for each in found["trainings"]},
            "Mean reward of a step",
            "step",
        )
    )
    for each in found["trainings"]:
        print(
            f"{each['name']}: {each['reward'][0]:.2f} -> {each['reward'][-1]:.2f} in"
            f" {len(each['reward'])} steps, {each['seconds']:.0f} s; {each['splits']} of"
            f" {each['rollouts']} rollouts split; log probabilities differ by at most"
            f" {each['max_logprob_difference']:.1e} on {each['trained_tokens']} tokens"
        )
    print(f"{found['seconds']:.0f} s in all; see {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
