"""The history of a run: the messages that its model has been sent, in order. Nothing in it is ever
edited, for prefix caches and token histories depend on that; to shrink, it begins a new segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from policies.prompts import BEFORE_SUMMARY
from proxy.agent.model import Message

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""SGLang's (and litellm's) name and vLLM's. Mistral's models think in parts of the content."""

Kind = Literal["theirs", "result", "said", "observed", "asked", "summary"]
"""theirs: the client's own; result: of a tool of the client's; said: by the model; observed: the
output of a tool of ours; asked: our words to the model; summary: of messages that are sent no more.
"""
DEFAULT_KINDS: Mapping[str, Kind] = {"assistant": "said", "tool": "observed", "user": "observed"}
"""The kind of a message by its role, unless it is marked; calls written as text are answered in the
user's role."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message and its kind."""

    message: Message
    kind: Kind
    ending: str = ""
    """The text that was added to its end by us."""


class History:
    """The messages of one run."""

    def __init__(
        self,
        messages: Sequence[Message],
        own_start: int | None = None,
        marks: Mapping[int, Kind] | None = None,
    ) -> None:
        """`own_start`: where the run's own messages begin; after all of them if not told. `marks`
        tells of those that are not what their role says."""
        self.own_start = len(messages) if own_start is None else own_start
        told = marks or {}
        self._entries = [
            Entry(each, "theirs" if n < self.own_start else told.get(n, _default_kind(each)))
            for n, each in enumerate(messages)
        ]

    @property
    def entries(self) -> Sequence[Entry]:
        """The current segment."""
        return self._entries

    @property
    def messages(self) -> list[Message]:
        """The messages of the current segment."""
        return [entry.message for entry in self.entries]

    @property
    def marks(self) -> dict[int, Kind]:
        """Which of the run's own messages are not what their role says."""
        ours = enumerate(self.entries[self.own_start :], self.own_start)
        return {n: each.kind for n, each in ours if each.kind != _default_kind(each.message)}

    def append(self, *messages: Message) -> None:
        """Add messages of the model or of tools."""
        self._entries.extend(Entry(each, _default_kind(each)) for each in messages)

    def append_request(self, words: str) -> None:
        """Add a message in which we ask the model."""
        self._entries.append(Entry({"role": "user", "content": words}, "asked"))

    def reset(self) -> None:
        """Begin a segment with the messages before the run's own alone."""
        self._entries = self._entries[: self.own_start]

    def append_to_last(self, text: str) -> None:
        """Add a text to the last message, which the model has not been sent yet."""
        last = self.entries[-1]
        content = last.message.get("content") or ""
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": text}]
        else:
            content += text
        message = {**last.message, "content": content}
        self._entries[-1] = replace(last, message=message, ending=text)

    def replace_with_stubs(self, stubs: Mapping[int, str]) -> None:
        """Begin a segment with these stubs in place of observations, by their indexes."""
        segment = list(self.entries)
        for n, words in stubs.items():
            segment[n] = replace(segment[n], message={**segment[n].message, "content": words})
        self._entries = segment

    def replace_with_summary(self, summary: str, latest: Sequence[Sequence[Entry]]) -> None:
        """Begin a segment with the client's own messages, a summary and the `latest` turns alone.

        Our last question is kept even if its turn is not, and so is the text that was added to the
        last message. Roles go on to alternate: many chat templates demand it.
        """
        kept = {id(entry) for turn in latest for entry in turn}
        ours = [each for each in self.entries[self.own_start :] if id(each) not in kept]
        head = [*self.entries[: self.own_start], *(e for e in ours if e.kind == "theirs")]
        lost = [each for each in self.entries[-1:] if id(each) not in kept]
        asked = [each for each in lost if each.kind == "asked"]
        self.own_start = len(head)
        told = _told(summary, head, is_followed_by_user=bool(asked))
        self._entries = [*head, *told, *(entry for turn in latest for entry in turn), *asked]
        if not asked and (ending := "".join(each.ending for each in lost)):
            self.append_to_last(ending)

    def turns(self) -> list[list[Entry]]:
        """Return the run's own messages by turns, each of which begins with the model's words. An
        earlier summary, and other messages before the first turn, belong to none."""
        turns: list[list[Entry]] = []
        for entry in self.entries[self.own_start :]:
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
    """Return a message's thinking, each text once: some servers send it in two fields."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    told = [message.get(field) for field in REASONING_FIELDS]
    told += [text_of({"content": part.get("thinking")}) for part in parts if isinstance(part, dict)]
    return list(dict.fromkeys(text for text in told if text and isinstance(text, str)))


def _told(summary: str, head: Sequence[Entry], *, is_followed_by_user: bool) -> list[Entry]:
    """Return a summary to follow these messages: in the model's role if the user's words follow,
    else in the user's."""
    if is_followed_by_user:
        return [Entry({"role": "assistant", "content": summary}, "summary")]
    told = [Entry({"role": "user", "content": summary}, "summary")]
    if head and head[-1].message.get("role") == "user":
        told.insert(0, Entry({"role": "assistant", "content": BEFORE_SUMMARY}, "summary"))
    return told


def _default_kind(message: Message) -> Kind:
    return DEFAULT_KINDS.get(str(message.get("role")), "theirs")
