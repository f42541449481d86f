"""Suspended runs: the model has called the client's tools, and the client sends their results in a
later request."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, NamedTuple, Protocol

from policies.sessions import ResumePoint, Session
from proxy.agent.model import Message

NO_RESULT = "The tool was not run."
MAX_RESUMED_RUNS = 16
"""Maximum number of suspended runs that one request may resume."""
INSTRUCTION_ROLES = ("system", "developer")
"""The roles of messages with instructions."""
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
    """The id of the call that the client got."""
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
    saved_files: Sequence[str] = ()
    """Paths of the produced files that the run has saved so far. The answer of the resumed run may
    link to them."""

    @property
    def key(self) -> str:
        """The key of the stored run, which is part of the ids of its calls: the run id, or for a
        call of legacy `functions` a digest of the call and of the state before it."""
        key = key_of_call(self.calls[0].client_id)
        assert key
        return key

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values."""
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
            "files": list(self.saved_files),
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
            saved_files=tuple(value.get("files", ())),
        )

    def with_instructions(self, instructions: Sequence[Message]) -> "SuspendedRun":
        """Return the run with its leading instructions replaced by `instructions`."""
        rest = self.messages[len(leading_instructions(self.messages)) :]
        moved = len(instructions) + len(rest) - len(self.messages)
        return replace(
            self,
            messages=[*instructions, *rest],
            run_start_index=self.run_start_index + moved,
            message_kinds={at + moved: kind for at, kind in self.message_kinds.items()},
        )

    def with_results(self, messages: Sequence[Message]) -> tuple[list[Message], dict[int, Any]]:
        """Return the run's messages, followed by the results of its calls and the client's later
        messages. Also return the kinds of messages, by index.

        The run's own messages are used even if the client has edited or dropped them.
        """
        ids = {call.client_id for call in self.calls}
        results = {
            str(message["tool_call_id"]): message
            for message in messages
            if message.get("role") == "tool" and message.get("tool_call_id") in ids
        }
        answered = result_messages(
            ((call.model_id, call.tool_name, results.get(call.client_id)) for call in self.calls),
            self.calls_are_text,
        )
        before = list(self.messages)
        if self.calls_are_text and before[-1].get("role") == "user":
            # The observations of the other calls of the turn: roles alternate, see result_messages.
            answered = [_merge_results(before.pop(), answered[0])]
        after = _messages_after_results(messages, ids)
        kinds = [*("result" for _ in answered), *("theirs" for _ in after)]
        message_kinds = {**self.message_kinds, **dict(enumerate(kinds, len(before)))}
        return [*before, *answered, *after], message_kinds


def leading_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the instructions at the beginning of the messages."""
    return list(takewhile(lambda message: message.get("role") in INSTRUCTION_ROLES, messages))


def answered_keys(messages: Sequence[Message]) -> list[str]:
    """Return the keys of the suspended runs whose calls are answered after the last assistant
    message, latest first."""
    found: dict[str, None] = {}
    for message in reversed(messages):
        if message.get("role") == "assistant":
            break
        answered = message.get("tool_call_id") if message.get("role") == "tool" else None
        if key := key_of_call(str(answered)):
            found[key] = None
    return list(found)[:MAX_RESUMED_RUNS]


def new_call_ids(run_id: str) -> Iterator[str]:
    """Yield ids for the calls of a run. They contain the run id, because a model's own ids are not
    unique."""
    return (f"call_{run_id}_{number}" for number in count(1))


def key_of_call(call_id: str) -> str | None:
    """Return the key of a suspended run in a call id, or None if the proxy did not create the call
    id."""
    match = _CALL_ID.fullmatch(call_id)
    return match[1] if match else None


def result_messages(
    results: Iterable[tuple[str, str, Message | None]], calls_are_text: bool
) -> list[Message]:
    """Return the messages that answer calls. Each result consists of the model's call id, the tool
    name, and the client's message with the result (None if the client sent none)."""
    contents = [
        (id, name, NO_RESULT if message is None else _result_content(message))
        for id, name, message in results
    ]
    if calls_are_text:
        # One message: many chat templates want user and assistant to alternate.
        text = "\n\n".join(
            f"Result of {name}:\n{_content_text(content)}" for _, name, content in contents
        )
        other = [part for _, _, content in contents for part in _non_text_parts(content)]
        parts = [{"type": "text", "text": text}, *other]
        return [{"role": "user", "content": parts if other else text}]
    return [{"role": "tool", "tool_call_id": id, "content": content} for id, _, content in contents]


def _merge_results(observations: Message, results: Message) -> Message:
    """Return one user message with the observations and then the results, which are the messages of
    calls that were written as text."""
    text, content = observations["content"], results["content"]
    if isinstance(content, str):
        return {**results, "content": f"{text}\n\n{content}"}
    first, *other = content
    return {**results, "content": [{**first, "text": f"{text}\n\n{first['text']}"}, *other]}


def _messages_after_results(messages: Sequence[Message], call_ids: set[str]) -> list[Message]:
    """Return the messages after the last result of the calls with these ids."""
    answered = (n for n, message in enumerate(messages) if message.get("tool_call_id") in call_ids)
    last = max(answered, default=len(messages) - 1)
    return list(messages[last + 1 :])


def _result_content(message: Message) -> Any:
    """Return a tool's result; "" if its message has no content."""
    content = message.get("content")
    return "" if content is None else content


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_part_text(part) or "" for part in content)
    return str(content)


def _non_text_parts(content: Any) -> list[Any]:
    """Return the parts that are not text, such as images."""
    return (
        [part for part in content if _part_text(part) is None] if isinstance(content, list) else []
    )


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None
