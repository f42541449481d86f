"""Suspended runs: the model has called the client's tools, and the client sends their results in a
later request."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

from policies.sessions import ResumePoint, Session
from proxy.agent.model import Message

NO_RESULT = "The tool was not run."
MAX_RUNS = 16
"""The most runs whose calls one request may answer."""
INSTRUCTION_ROLES = ("system", "developer")
"""The roles of instructions."""
_MINTED = re.compile(r"call_([0-9a-z]+)_\d+")


class SuspendedRunStore(Protocol):
    """Keeps suspended runs."""

    async def save(self, owner: str, run: "SuspendedRun") -> None:
        """Keep a run for a while, for that owner alone, in place of one of the same name."""

    async def find(self, owner: str, run_id: str) -> "SuspendedRun | None":
        """Return the run of that name, or None. It stays: the client may send its request again."""


@dataclass(frozen=True, slots=True)
class SuspendedRun:
    """What a run needs to go on once its client has answered."""

    messages: Sequence[Message]
    """All that the model was sent, and the turn with the calls."""
    own_start: int
    """The index at which the run's own messages begin."""
    calls: Sequence[tuple[str, str, str]]
    """Each call: its id for the client, the model's own id, and the tool's name."""
    as_text: bool
    """Whether the calls were written as text, so that no `tool` message can answer them."""
    resume_from: ResumePoint | None
    """Its workspace, if it has one."""
    used_sandbox: bool = True
    """Whether it has used a sandbox, so that the answer files in it are its own."""
    marks: Mapping[int, Any] = field(default_factory=dict)
    """The kinds of messages that are not what their role says (see History), by index."""

    @property
    def run_id(self) -> str:
        """The name by which it is found: the part that the ids of its calls have in common."""
        found = run_id_of_call(self.calls[0][0])
        assert found
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        at = self.resume_from
        workspace = at and [at.session.owner, at.session.name, list(at.parents)]
        return {
            "messages": list(self.messages),
            "ours_from": self.own_start,
            "calls": [list(call) for call in self.calls],
            "as_text": self.as_text,
            "workspace": workspace,
            "began": self.used_sandbox,
            "marks": [[at, kind] for at, kind in self.marks.items()],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SuspendedRun":
        """Return the run that `to_json` wrote."""
        at = value["workspace"]
        return cls(
            messages=value["messages"],
            own_start=value["ours_from"],
            calls=[(theirs, own, name) for theirs, own, name in value["calls"]],
            as_text=value["as_text"],
            resume_from=ResumePoint(Session(at[0], at[1]), at[2]) if at else None,
            used_sandbox=value.get("began", True),
            marks={int(at): kind for at, kind in value.get("marks", ())},
        )

    def with_instructions(self, instructions: Sequence[Message]) -> "SuspendedRun":
        """Return the same run under other instructions: another agent may take a call's result."""
        rest = self.messages[len(leading_instructions(self.messages)) :]
        moved = len(instructions) + len(rest) - len(self.messages)
        return replace(
            self,
            messages=[*instructions, *rest],
            own_start=self.own_start + moved,
            marks={at + moved: kind for at, kind in self.marks.items()},
        )

    def with_results(self, messages: Sequence[Message]) -> tuple[list[Message], dict[int, Any]]:
        """Return the run's messages and those that the client's request adds, with their marks.

        The client may have changed or dropped messages before its results: the run's own stay.
        """
        ids = {theirs for theirs, _, _ in self.calls}
        results = {
            str(message["tool_call_id"]): message
            for message in messages
            if message.get("role") == "tool" and message.get("tool_call_id") in ids
        }
        told = result_messages(
            ((own, name, results.get(theirs)) for theirs, own, name in self.calls), self.as_text
        )
        after = _after(messages, ids)
        given = [*("result" for _ in told), *("theirs" for _ in after)]
        marks = {**self.marks, **dict(enumerate(given, len(self.messages)))}
        return [*self.messages, *told, *after], marks


def leading_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the instructions that messages begin with."""
    return list(takewhile(lambda message: message.get("role") in INSTRUCTION_ROLES, messages))


def answered_run_ids(messages: Sequence[Message]) -> list[str]:
    """Return the names of the runs whose calls are answered after the assistant's last message,
    latest first."""
    found: dict[str, None] = {}
    for message in reversed(messages):
        if message.get("role") == "assistant":
            break
        answered = message.get("tool_call_id") if message.get("role") == "tool" else None
        if name := run_id_of_call(str(answered)):
            found[name] = None
    return list(found)[:MAX_RUNS]


def run_id_of_call(id: str) -> str | None:
    """Return the run in which a call's id was made, or None if the id is not of ours."""
    minted = _MINTED.fullmatch(id)
    return minted[1] if minted else None


def result_messages(
    results: Iterable[tuple[str, str, Message | None]], as_text: bool
) -> list[Message]:
    """Return the messages with the results of calls, which are given as the model's id, the tool's
    name and the client's message."""
    given = [
        (id, name, NO_RESULT if message is None else _content(message))
        for id, name, message in results
    ]
    if as_text:
        # One message: many chat templates want user and assistant to alternate.
        told = "\n\n".join(f"Result of {name}:\n{_text(content)}" for _, name, content in given)
        shown = [part for _, _, content in given for part in _beside_text(content)]
        parts = [{"type": "text", "text": told}, *shown]
        return [{"role": "user", "content": parts if shown else told}]
    return [{"role": "tool", "tool_call_id": id, "content": content} for id, _, content in given]


def _after(messages: Sequence[Message], ids: set[str]) -> list[Message]:
    """Return the messages after the last result of these calls."""
    answered = (n for n, message in enumerate(messages) if message.get("tool_call_id") in ids)
    last = max(answered, default=len(messages) - 1)
    return list(messages[last + 1 :])


def _content(message: Message) -> Any:
    """Return a tool's result; "" if its message has no content."""
    content = message.get("content")
    return "" if content is None else content


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_words(part) or "" for part in content)
    return str(content)


def _beside_text(content: Any) -> list[Any]:
    """Return the parts that are no text, such as pictures."""
    return [part for part in content if _words(part) is None] if isinstance(content, list) else []


def _words(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None
