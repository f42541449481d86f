"""What is written down of a run: no text that is long, no key, and nothing that the client has not
been told. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from proxy.agent.events import (
    EgressDecided,
    Event,
    OfChoice,
    RuleMet,
    RunStarted,
    ToolCallFinished,
    ToolCallStarted,
)
from proxy.agent.result import Result
from proxy.agent.task import Task
from proxy.audit.chain import LAST, Fields
from proxy.errors import ProxyError

MAX_CHARS = 2_000
"""A longer argument is told by its hash, but for a command, which is told whole."""


def request(task: Task, owner: str, fingerprint: str) -> Fields:
    """What was asked for, by whom."""
    return {
        "kind": "request",
        "run": task.run_id,
        "owner": owner,
        "model": task.model,
        "profile": task.profile.name,
        "policies": _hash_of(asdict(task.profile)),
        "container": task.outbox.container_id,
        "choices": 1 + len(task.others),
        "client_tools": [str(tool.get("function", {}).get("name")) for tool in task.client_tools],
        "body": fingerprint,
        "messages": [_hash_of(message) for message in task.messages],
        "files": {file.path: file.identity for file in task.inputs},
    }


def happened(event: Event) -> Fields | None:
    """What is told of an event, if anything."""
    match event:
        case OfChoice(index, of):
            told = happened(of)
            return {**told, "choice": index} if told else None
        case RunStarted(_, prompt) if prompt:
            return {"kind": "prompt", "sha256": prompt}
        case ToolCallStarted(step, call_id, name, arguments):
            told = {each: _argument(each, value) for each, value in arguments.items()}
            call = {"step": step, "call": call_id, "tool": name}
            return {"kind": "call", **call, "arguments": told}
        case ToolCallFinished():
            return _outcome(event)
        case EgressDecided(decision):
            return {"kind": "egress", **asdict(decision)}
        case RuleMet():
            return {"kind": "rule", **asdict(event)}
    return None


def ended(result: Result) -> Fields:
    """How it ended, and all files that were handed back."""
    return {
        "kind": "result",
        LAST: True,
        "choices": [_choice(each) for each in (result, *result.others)],
    }


def failed(error: BaseException) -> Fields:
    """That it has not come to a result."""
    told = {"error": type(error).__name__}
    if isinstance(error, ProxyError):
        told |= {"code": error.code or "", "message": error.message}
    return {"kind": "failure", LAST: True, **told}


def _outcome(event: ToolCallFinished) -> Fields:
    return {
        "kind": "outcome",
        "step": event.step,
        "exit_code": event.exit_code,
        "ms": round(event.duration_s * 1000),
        "observation": _hash(event.observation),
        "chars": len(event.observation),
    }


def _choice(result: Result) -> dict[str, Any]:
    files = [
        {"path": file.path, "bytes": file.bytes, "sha256": file.sha256, "id": file.file_id}
        for file in result.artifacts
    ]
    return {
        "run": result.run_id,
        "stop_reason": str(result.stop_reason),
        "finish_reason": result.finish_reason,
        "answer": _hash(result.answer),
        "usage": result.usage,
        "tally": result.tally.counts(),
        "files": files,
        "left_out": [file.path for file in result.left_out],
        "warnings": [notice.code for notice in result.notices],
    }


def _argument(name: str, value: object) -> Any:
    if isinstance(value, str):
        if name == "command" or len(value) <= MAX_CHARS:
            return value
        return {"sha256": _hash(value), "chars": len(value)}
    if value is None or isinstance(value, bool | int | float):
        return value
    return {"type": type(value).__name__}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hash_of(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(value, sort_keys=True, default=str))
