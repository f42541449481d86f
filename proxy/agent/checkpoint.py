"""Checkpoints: the state of a run before the tool calls of a turn, from which another server goes
on if the run's own server dies.

A run has checkpoints if its request has an Idempotency-Key, the servers share a store, and the
backend's sandboxes survive their server. `AgentLoop` writes one before the calls of each turn. The
server that gets the client's retry reads it, adopts the sandbox, and requests the commands of the
turn again by their ids: none of them runs twice.
"""

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.agent.history import History
from proxy.agent.model import Completion, Message
from proxy.agent.tool_calls import ToolCall, Turn
from sandbox_runtime.sandbox import SandboxReference

SaveCheckpoint = Callable[["Checkpoint | None"], Awaitable[bool]]
"""Stores a checkpoint in place of an earlier one; None removes the earlier one. Returns False if
nothing was stored, because the checkpoint is too long or the store is unavailable. Raises
RunLostError if other servers have found this one dead."""
MAX_CHECKPOINT_CHARS = 4 << 20
"""Maximum length of a stored checkpoint. A longer checkpoint is not stored."""
MAX_CALLS_OF_TURN = 60
"""Maximum number of calls in a turn that has a checkpoint. Guest agents keep the results of 64
commands."""
UNKNOWN_OUTCOME = (
    "The server that ran this call has ended. It is not known whether the call had its effect:"
    " check that, and repeat the call if it had none."
)
"""The observation for a call that the dead server may have run and that the proxy must not repeat,
and for the calls after it."""
_VERSION = 1
"""The version of the stored form. Increase it when the fields of Checkpoint, Turn, ToolCall,
Completion, SandboxReference or of a value in `Checkpoint.state` change."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run before the tool calls of a turn."""

    sandbox: SandboxReference
    turn: Turn
    reply: Completion
    """The reply with the calls, without its log probabilities."""
    messages: Sequence[Message]
    """The history, which ends with the turn's message."""
    run_start_index: int
    message_kinds: Mapping[int, Any]
    wall_time_s: float
    """Duration of the run so far."""
    state: Mapping[str, Any]
    """The states of the run's parts, as JSON values by the name of the part."""
    command_prefix: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """The beginning of the ids of the turn's commands. It is new in each checkpoint, so that no
    command of another turn has the same id."""

    def history(self) -> History:
        """Return the history up to the turn's message."""
        return History(list(self.messages), self.run_start_index, self.message_kinds)

    def to_json(self) -> str | None:
        """Return the JSON text that `from_json` reads, or None if it is too long."""
        text = json.dumps({**asdict(self), "version": _VERSION})
        return text if len(text) <= MAX_CHECKPOINT_CHARS else None

    @classmethod
    def from_json(cls, text: str) -> "Checkpoint | None":
        """Return the checkpoint of a text, or None if it cannot be read, because a server of
        another version wrote it."""
        try:
            value = json.loads(text)
            if value.pop("version") != _VERSION:
                return None
            turn = value.pop("turn")
            calls = tuple(ToolCall(**call) for call in turn.pop("calls"))
            kinds = {int(index): kind for index, kind in value.pop("message_kinds").items()}
            return cls(
                turn=Turn(calls=calls, **turn),
                reply=Completion(**value.pop("reply")),
                message_kinds=kinds,
                **value,
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def may_be_repeated(tool_name: str, arguments: object) -> bool:
    """Return True if a tool call can be requested again without a second effect. The guest agent
    recognizes a command by its id, and a call that only reads changes nothing. An edit, or input
    to a running job, would take effect twice."""
    fields = arguments if isinstance(arguments, Mapping) else {}
    match tool_name:
        case "execute_bash":
            return fields.get("job_id") is None or not fields.get("command")
        case "str_replace_editor":
            return fields.get("command") == "view"
        case "submit":
            return True
        case _:
            return False
