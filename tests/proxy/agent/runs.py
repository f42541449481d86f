"""Test driver: one run of the agent loop with its events and requests."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies.artifacts import ProducedFile
from policies.limits import Limits
from policies.profile import Profile
from proxy.agent.agent import Agent
from proxy.agent.context_windows import ContextWindows
from proxy.agent.events import (
    AnswerDelta,
    Event,
    FileProduced,
    OnDelta,
    ReasoningDelta,
    ToolCallFinished,
)
from proxy.agent.model import Completion, Model
from proxy.agent.result import Artifact, Result
from proxy.errors import BackendError
from proxy.models.scripted import ScriptedModel, call, tool_reply
from proxy.workspaces import Workspaces
from sandbox_runtime.sandbox import Sandbox, Sandboxes
from sandbox_runtime.tools import make_tools
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.tasks import make_task
from tests.sandbox_runtime.transfer import read

USER = {"role": "user", "content": "How many?"}
SUBMIT = tool_reply(call("submit", answer="42"))
OVERFLOW = {"error": {"status": 400, "message": "too long", "code": "context_length_exceeded"}}
FAILURE = {"error": {"status": 500, "message": "the backend is on fire"}}
LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}},
}
"""A client tool."""


def bash(command: str) -> dict[str, Any]:
    """Return a call of execute_bash."""
    return call("execute_bash", command=command)


class MemoryArtifactStore:
    """An ArtifactStore in memory."""

    container_id = "cntr_test"

    def __init__(self) -> None:
        self.saved: dict[str, bytes] = {}

    def artifact_url(self, path: str) -> str:
        return f"https://files.test/{path.rpartition('/')[2]}"

    async def has(self, path: str) -> bool:
        return path in self.saved

    async def save(self, sandbox: Sandbox, file: ProducedFile, timeout_s: float) -> Artifact:
        data = await read(sandbox, file.path, max_bytes=file.bytes, timeout_s=timeout_s)
        self.saved[file.path] = data
        return Artifact(
            file_id=f"cfile_{len(self.saved)}",
            container_id=self.container_id,
            path=file.path,
            bytes=len(data),
            mime_type="text/plain",
            sha256=hashlib.sha256(data).hexdigest(),
            url=self.artifact_url(file.path),
            data_url=None,
        )


class Events(list[Event]):
    """Records events and passes each to `then`."""

    def __init__(self, then: Callable[[Event], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self._then = then

    async def __call__(self, event: Event) -> None:
        if isinstance(event, ToolCallFinished):
            event = replace(event, duration_s=0.0)
        self.append(event)
        if self._then is not None:
            await self._then(event)

    @property
    def answer(self) -> str:
        return "".join(event.text for event in self if isinstance(event, AnswerDelta))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self if isinstance(event, ReasoningDelta))

    @property
    def observations(self) -> list[str]:
        return [event.observation for event in self if isinstance(event, ToolCallFinished)]

    @property
    def files(self) -> list[str]:
        return [event.path for event in self if isinstance(event, FileProduced)]


class SequentialModel(ScriptedModel):
    """A model that returns its replies in order, independent of the history."""

    def __init__(self, replies: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(replies)
        self._calls = 0

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        history = [{"role": "assistant"}] * self._calls
        request_index = len(self.requests)
        try:
            return await super().complete({**body, "messages": history}, on_delta)
        except BackendError:
            self._calls -= 1  # an error is not one of the replies
            raise
        finally:
            self._calls += 1
            self.requests[request_index] = dict(body)


AT_ONCE = Profile(enabled="always")
"""The profile that leases a sandbox at the start of each run."""


@dataclass
class Run:
    """The set-up of a run, and its events after `go`."""

    model: Model
    sandboxes: Sandboxes = field(default_factory=MemorySandboxes)
    snapshots: MemorySnapshots = field(default_factory=MemorySnapshots)
    profile: Profile = Profile()
    limits: Limits = Limits()
    events: Events = field(default_factory=Events)
    artifact_store: MemoryArtifactStore = field(default_factory=MemoryArtifactStore)
    window: int | None = None
    """Configured context window, in tokens."""

    async def go(self, **fields: Any) -> Result:
        """Run a task with these fields."""
        task = make_task(
            **{
                "run_id": "r1",
                "artifact_store": self.artifact_store,
                "model": "m",
                "messages": [USER],
                "profile": replace(self.profile, limits=self.limits),
                **fields,
            }
        )
        workspaces = Workspaces(self.sandboxes, self.snapshots, keep_s=60, max_kept=0)
        agent = Agent(self.model, workspaces, make_tools, windows=ContextWindows(self.window))
        try:
            return await agent.answer(task, self.events)
        finally:
            await workspaces.aclose()


async def answered(replies: Sequence[Mapping[str, Any]], **fields: Any) -> Result:
    """Return the result of a run with these replies."""
    return await Run(ScriptedModel(replies)).go(**fields)


def valid(body: Mapping[str, Any]) -> bool:
    """Return True if the messages are valid for a backend.

    Each tool call has one result, before the next message of another role, and its arguments are a
    JSON object.
    """
    open_calls: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return False
            open_calls.remove(message["tool_call_id"])
            continue
        calls = message.get("tool_calls") or []
        ids = [call["id"] for call in calls]
        if open_calls or len(set(ids)) < len(ids) or not all(ids):
            return False
        if not all(_is_valid_call(call["function"]) for call in calls):
            return False
        open_calls = ids
    return not open_calls


def _is_valid_call(function: Mapping[str, Any]) -> bool:
    return bool(function["name"]) and isinstance(json.loads(function["arguments"]), dict)
