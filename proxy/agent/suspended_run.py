"""The stored state of a suspended run, the interface to its store, and the call ids by which it is
found again. `proxy.agent.suspension` suspends and resumes runs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

from policies.sessions import ResumePoint, Session
from proxy.agent.model import Message

_CALL_ID = re.compile(r"call_([0-9a-z]+)_\d+")
"""The form of the ids of `new_call_ids` and `function_call_id`."""


class SuspendedRunStore(Protocol):
    """Stores suspended runs."""

    async def save(self, owner: str, run: "SuspendedRun") -> None:
        """Store a run of an owner for a while. Replace a run with the same key."""

    async def find(self, owner: str, key: str) -> "SuspendedRun | None":
        """Return the run with this key, or None. Do not delete it: the client may retry its
        request."""


class SuspendedCall(NamedTuple):
    """A call whose result the client sends later."""

    client_id: str
    """The id under which the client got the call."""
    model_id: str
    """The id that the model gave the call."""
    tool_name: str


@dataclass(frozen=True, slots=True)
class SuspendedRun:
    """The state that a run resumes from once the client has sent the results of its calls."""

    messages: Sequence[Message]
    """The messages of the last prompt, and the turn with the calls."""
    run_start_index: int
    """Index of the first message of the run itself."""
    calls: Sequence[SuspendedCall]
    calls_are_text: bool
    """True if the calls were written as text, so that no `tool` message can answer them."""
    resume_from: ResumePoint | None
    """The saved state of the run's workspace, if there is one."""
    used_sandbox: bool = True
    """True if the run has used a sandbox. The answer files in the sandbox are then the run's."""
    message_kinds: Mapping[int, Any] = field(default_factory=dict)
    """Kinds, by message index, of the messages whose kind is not the default of their role. See
    `History`."""
    answer_file: str = ""
    """The text of the answer file in the run's sandbox, or ""."""

    @property
    def key(self) -> str:
        """The key of the stored run, which is part of the ids of its calls: the run id, or for a
        call of legacy `functions` a digest of the call and of the state before it."""
        key = suspended_run_key(self.calls[0].client_id)
        assert key
        return key

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values to store. Most of the JSON keys are the names that the
        fields had in an earlier release."""
        at = self.resume_from
        workspace = at and [at.session.owner, at.session.name, list(at.parents)]
        return {
            "messages": list(self.messages),
            "ours_from": self.run_start_index,
            "calls": [list(call) for call in self.calls],
            "as_text": self.calls_are_text,
            "workspace": workspace,
            "began": self.used_sandbox,
            "marks": [[at, kind] for at, kind in self.message_kinds.items()],
            "answer_file": self.answer_file,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SuspendedRun":
        """Return the run from the value of `to_json`."""
        at = value["workspace"]
        return cls(
            messages=value["messages"],
            run_start_index=value["ours_from"],
            calls=[SuspendedCall(*call) for call in value["calls"]],
            calls_are_text=value["as_text"],
            resume_from=ResumePoint(Session(at[0], at[1]), at[2]) if at else None,
            used_sandbox=value.get("began", True),
            message_kinds={int(at): kind for at, kind in value.get("marks", ())},
            answer_file=value.get("answer_file", ""),
        )


def new_call_ids(run_id: str) -> Iterator[str]:
    """Yield ids for the calls of a run. They contain the run id, because a model's own ids are not
    unique."""
    return (f"call_{run_id}_{number}" for number in count(1))


def suspended_run_key(call_id: str) -> str | None:
    """Return the key of a suspended run in a call id, or None if the proxy did not create the call
    id."""
    match = _CALL_ID.fullmatch(call_id)
    return match[1] if match else None
