"""Steps as server-sent events of their own (profile `events`), for interfaces that know them."""

from dataclasses import asdict
from typing import Any

from policies.history import step_id
from policies.steps import is_shown
from proxy.agent.events import (
    EgressDecided,
    Event,
    FileProduced,
    RuleMet,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from sandbox_runtime.egress.decision import Decision

EVENT_NAME = "sandbox.step"
MAX_OUTPUT_CHARS = 100_000
"""Characters of one command's output; what came of it is told whole when it ends."""


class StepEvents:
    """The steps of one run, each as the JSON object of its event."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._output_left = MAX_OUTPUT_CHARS

    def of(self, event: Event) -> dict[str, Any] | None:
        """The object of an event, if it has one."""
        told = self._told(event)
        return {"v": 1, "run_id": self._run_id, **told} if told else None

    def _told(self, event: Event) -> dict[str, Any] | None:
        match event:
            case ToolCallStarted() | ToolCallFinished() if not is_shown(event.name):
                return None
            case ToolCallStarted():
                self._output_left = MAX_OUTPUT_CHARS
                return self._started(event)
            case ToolOutput():
                return self._output(event)
            case ToolCallFinished():
                return _ended(event)
        return _beside_calls(event)

    def _started(self, event: ToolCallStarted) -> dict[str, Any]:
        return {
            "kind": "tool_start",
            "step": event.step,
            "call_id": step_id(self._run_id, event.step),
            "tool": event.name,
            "arguments": dict(event.arguments),
        }

    def _output(self, event: ToolOutput) -> dict[str, Any] | None:
        text = event.text[: self._output_left]
        self._output_left -= len(text)
        if not text:
            return None
        return {"kind": "tool_output", "step": event.step, "stream": event.stream, "text": text}


def named(chunk: str) -> str:
    """The event as it is sent: a chunk that says nothing to who does not know it."""
    return f"event: {EVENT_NAME}\ndata: {chunk}"


def _beside_calls(event: Event) -> dict[str, Any] | None:
    match event:
        case RunStarted():
            return {"kind": "run_started"}
        case StepsOmitted(steps):
            return {"kind": "steps_omitted", "steps": steps}
        case EgressDecided(decision):
            return _egress(decision)
        case RuleMet():
            return {"kind": "rule", **asdict(event)}
        case FileProduced(file_id, path, size):
            return {"kind": "file", "id": file_id, "path": path, "bytes": size}
        case RunFinished(stop_reason):
            return {"kind": "run_finished", "stop_reason": str(stop_reason)}
    return None


def _ended(event: ToolCallFinished) -> dict[str, Any]:
    return {
        "kind": "tool_end",
        "step": event.step,
        "exit_code": event.exit_code,
        "ms": round(event.duration_s * 1000),
        "observation": event.observation,
    }


def _egress(decision: Decision) -> dict[str, Any]:
    return {
        "kind": "egress",
        "verdict": decision.verdict,
        "host": decision.host,
        "port": decision.port,
        "reason": decision.reason,
        "bytes_up": decision.bytes_up,
        "bytes_down": decision.bytes_down,
    }
