"""The history of a run: the messages of its prompts, in order.

Messages that were sent to the model are not changed, because prefix caches and token histories
depend on that. There are two exceptions: a compaction or a repair of tool calls begins a new
segment, and the plain turn drops the run's own messages (see `AgentLoop`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from policies.prompts import BEFORE_SUMMARY
from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta, ToolCallDelta
from proxy.agent.model import Completion, Message

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""The fields of a message that contain reasoning: SGLang and litellm use the first, vLLM the
second. Mistral sends reasoning as content parts instead."""

MessageKind = Literal["theirs", "result", "said", "observed", "asked", "summary"]
"""The origin of a message. theirs: the client; result: a client tool; said: the model; observed:
one of the proxy's tools; asked: a request by the proxy; summary: the summary of earlier messages.
These words are stored with suspended runs."""
DEFAULT_KINDS: Mapping[str, MessageKind] = {
    "assistant": "said",
    "tool": "observed",
    "user": "observed",
}
"""The kind of a message whose kind is not given, by role. Observations of calls written as text
have the user role."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message and its kind."""

    message: Message
    kind: MessageKind
    appended_text: str = ""
    """Text that the proxy appended to the message."""


class History:
    """The messages of one run."""

    def __init__(
        self,
        messages: Sequence[Message],
        run_start_index: int | None = None,
        message_kinds: Mapping[int, MessageKind] | None = None,
    ) -> None:
        """`run_start_index` is the index of the first message of the run itself; None: after all
        messages. `message_kinds` has the kinds, by message index, of those messages whose kind is
        not the default of their role."""
        self.run_start_index = len(messages) if run_start_index is None else run_start_index
        message_kinds = message_kinds or {}
        self._entries = [
            Entry(
                message,
                "theirs"
                if n < self.run_start_index
                else message_kinds.get(n, _default_kind(message)),
            )
            for n, message in enumerate(messages)
        ]

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries of the current segment."""
        return self._entries

    @property
    def messages(self) -> list[Message]:
        """The messages of the current segment."""
        return [entry.message for entry in self.entries]

    @property
    def message_kinds(self) -> dict[int, MessageKind]:
        """The kinds, by message index, of those messages of the run whose kind is not the default
        of their role."""
        own = enumerate(self.entries[self.run_start_index :], self.run_start_index)
        return {n: entry.kind for n, entry in own if entry.kind != _default_kind(entry.message)}

    def append(self, *messages: Message) -> None:
        """Append messages of the model or of tools."""
        self._entries.extend(Entry(message, _default_kind(message)) for message in messages)

    def append_request(self, text: str) -> None:
        """Append a request from the proxy to the model, as a user message."""
        self._entries.append(Entry({"role": "user", "content": text}, "asked"))

    def drop_run_messages(self) -> None:
        """Drop the run's own messages."""
        self._entries = self._entries[: self.run_start_index]

    def append_to_last_message(self, text: str) -> None:
        """Append a text to the last message, which was not sent to the model yet."""
        last = self.entries[-1]
        content = last.message.get("content") or ""
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": text}]
        else:
            content += text
        message = {**last.message, "content": content}
        self._entries[-1] = replace(last, message=message, appended_text=text)

    def replace_messages(self, messages: Mapping[int, Message]) -> None:
        """Begin a segment in which some messages are replaced. `messages` has the new messages, by
        the index of the message that each one replaces."""
        segment = list(self.entries)
        for n, message in messages.items():
            segment[n] = replace(segment[n], message=message)
        self._entries = segment

    def replace_with_stubs(self, stubs: Mapping[int, str]) -> None:
        """Begin a segment in which stubs replace observations. The keys of `stubs` are message
        indexes."""
        messages = self.messages
        self.replace_messages({n: {**messages[n], "content": stubs[n]} for n in stubs})

    def replace_with_summary(self, summary: str, latest_turns: Sequence[Sequence[Entry]]) -> None:
        """Begin a segment of the client's messages, a summary and the `latest_turns`.

        The proxy's last request and the text appended to the last message are kept even if their
        turn is not. Roles still alternate: many chat templates demand that.
        """
        kept = {id(entry) for turn in latest_turns for entry in turn}
        dropped = [entry for entry in self.entries[self.run_start_index :] if id(entry) not in kept]
        head = [*self.entries[: self.run_start_index], *(e for e in dropped if e.kind == "theirs")]
        last = [entry for entry in self.entries[-1:] if id(entry) not in kept]
        request = [entry for entry in last if entry.kind == "asked"]
        self.run_start_index = len(head)
        middle = _summary_entries(summary, head, is_followed_by_user=bool(request))
        self._entries = [
            *head,
            *middle,
            *(entry for turn in latest_turns for entry in turn),
            *request,
        ]
        if not request and (text := "".join(entry.appended_text for entry in last)):
            self.append_to_last_message(text)

    def turns(self) -> list[list[Entry]]:
        """Return the run's own messages by turn. Each turn begins with the model's message;
        messages before the first turn, such as a summary, are left out."""
        turns: list[list[Entry]] = []
        for entry in self.entries[self.run_start_index :]:
            if entry.kind == "said":
                turns.append([entry])
            elif turns:
                turns[-1].append(entry)
        return turns


def text_of(message: Message) -> str:
    """Return a message's text, whether it is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def reasoning_texts(message: Message) -> list[str]:
    """Return a message's reasoning, each text once: some servers send it in two fields."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    found = [message.get(field) for field in REASONING_FIELDS]
    found += [
        text_of({"content": part.get("thinking")}) for part in parts if isinstance(part, dict)
    ]
    return list(dict.fromkeys(text for text in found if text and isinstance(text, str)))


def completion_deltas(completion: Completion) -> list[ModelDelta]:
    """Return the deltas of a completion that was not streamed, for a caller that expects a
    stream."""
    message = completion.message
    deltas: list[ModelDelta] = [ReasoningDelta(thought) for thought in reasoning_texts(message)]
    text, logprobs = text_of(message), completion.choice.get("logprobs")
    if text or logprobs:
        deltas.append(TextDelta(text, logprobs))
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {})
            deltas.append(ToolCallDelta(index, name, arguments))
    return deltas


def _summary_entries(
    summary: str, preceding_entries: Sequence[Entry], *, is_followed_by_user: bool
) -> list[Entry]:
    """Return the entries of a summary after the `preceding_entries`: in the assistant role if a
    user message follows, else in the user role."""
    if is_followed_by_user:
        return [Entry({"role": "assistant", "content": summary}, "summary")]
    entries = [Entry({"role": "user", "content": summary}, "summary")]
    if preceding_entries and preceding_entries[-1].message.get("role") == "user":
        entries.insert(0, Entry({"role": "assistant", "content": BEFORE_SUMMARY}, "summary"))
    return entries


def _default_kind(message: Message) -> MessageKind:
    return DEFAULT_KINDS.get(str(message.get("role")), "theirs")
