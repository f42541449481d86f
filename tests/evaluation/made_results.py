"""Make the directory of an evaluation without a run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.results import (
    RequestKey,
    Result,
    RunInfo,
    RunSettings,
    SandboxUse,
    Step,
    Trajectory,
    Turn,
    open_results,
)
from evaluation.samples import Suite

STARTED = "2026-01-02T03:04:05.678+00:00"
USE = SandboxUse(
    stop_reason="submitted",
    route="always",
    turns=2,
    model_calls=2,
    tool_calls=1,
    failed_tool_calls=0,
    observation_tokens=20,
    trajectory_tokens=150,
    capability_turns={"computation": 1, "external_resources": 0, "file_management": 0},
)


def plain(sample: str, answer: str, **changes: Any) -> Result:
    """Return an answer of the mode plain."""
    return _result("plain", sample, answer, {"finish_reason": "stop", **changes})


def with_sandbox(sample: str, answer: str, **changes: Any) -> Result:
    """Return an answer of the mode sandbox, of a run with two turns."""
    return _result("sandbox", sample, answer, {"sandbox": USE, **changes})


def _result(mode: str, sample: str, answer: str, changes: Mapping[str, Any]) -> Result:
    fields = {
        "model": "made-model",
        "mode": mode,
        "repeat": 0,
        "sample": sample,
        "status": "answered",
        "answer": answer,
        "started": STARTED,
        "latency_s": 2.0,
        "prompt_tokens": 100,
        "completion_tokens": 30,
    }
    return Result.model_validate({**fields, **changes})


def trajectory(result: Result, *commands: str, **changes: Any) -> Trajectory:
    """Return a trajectory with one step for each command, with the numbers from 1. Each has the
    output `done`."""
    steps = [
        Step(
            number=number,
            tool="execute_bash",
            arguments={"command": command},
            observation="done",
            exit_code=0,
            duration_ms=10,
        )
        for number, command in enumerate(commands, 1)
    ]
    fields = {**result.key._asdict(), "started": result.started, "steps": steps}
    return Trajectory.model_validate({**fields, **changes})


def turn(number: int, *steps: int, capabilities: Sequence[str] | None = ()) -> Turn:
    """Return a captured turn with these steps and capabilities."""
    kept = None if capabilities is None else tuple(capabilities)
    return Turn(number=number, model_s=0.1, steps=steps, capabilities=kept)


def write(
    output: Path,
    suite: Suite,
    records: Iterable[tuple[Result, Trajectory | None]],
    **settings: Any,
) -> set[RequestKey]:
    """Write an evaluation of a suite. Return the keys that need no further request."""
    values = {"sandbox": {}, "request": {}, "seed": None, **settings}
    suites = {suite.manifest.name: suite.manifest.sha256}
    info = RunInfo(
        settings=RunSettings.model_validate({"suites": suites, **values}),
        data=str(suite.directory.parent),
        concurrency=4,
        versions={"llm-sandbox-proxy": "0.0.0"},
    )
    with open_results(output, info) as writer:
        for result, trajectory in records:
            writer.append(result, trajectory)
        return writer.done_keys
