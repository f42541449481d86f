"""The items of a response's output while they are made, each change of theirs as an event."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.agent.events import ClientCallDelta, ClientCallFinished, ClientCallStarted
from proxy.wire.responses_builtin import PREFIXES, call_fields

Told = dict[str, Any]
"""An event of the stream, but for its number; or an item, or a part of one."""


class Output:
    """The items so far. Their ids are made of the run's and of their places."""

    def __init__(self, run_id: str, container_id: str) -> None:
        self.run_id = run_id
        self.container_id = container_id
        self.items: list[Told] = []

    def begin(self, prefix: str, item: Told) -> tuple["Place", Told]:
        """Begin an item."""
        index = len(self.items)
        place = Place(index, f"{prefix}_{self.run_id}_{index}")
        self.items.append({"id": place.id, **item})
        return place, self._told("added", index)

    def end(self, place: "Place", **changes: Any) -> Told:
        """An item as it stays."""
        self.items[place.index] = {**self.items[place.index], **changes}
        return self._told("done", place.index)

    def _told(self, what: str, index: int) -> Told:
        type = f"response.output_item.{what}"
        return {"type": type, "output_index": index, "item": self.items[index]}


class Place:
    """Where an item is."""

    def __init__(self, index: int, id: str) -> None:
        self.index = index
        self.id = id

    def event(self, name: str, /, **fields: Any) -> Told:
        """What happens to it."""
        return {
            "type": f"response.{name}",
            "item_id": self.id,
            "output_index": self.index,
            **fields,
        }


class Thinking:
    """Reasoning items: what is thought in a row is one, its text where every client looks."""

    def __init__(self, output: Output, *, encrypted: bool) -> None:
        """`encrypted`: whether the client asked for thinking that it could send back."""
        self._output = output
        self._place: Place | None = None
        self._text: list[str] = []
        # It is never looked at again, so there is none; but who asks for the field finds it.
        self._fields: Told = {"encrypted_content": None} if encrypted else {}

    def say(self, text: str) -> list[Told]:
        """Think on."""
        begun: list[Told] = []
        if self._place is None:
            item = {"type": "reasoning", "summary": [], **self._fields, "status": "in_progress"}
            self._place, added = self._output.begin("rs", item)
            begun = [added, self._part("added", "")]
        self._text.append(text)
        delta = self._place.event("reasoning_summary_text.delta", summary_index=0, delta=text)
        return [*begun, delta]

    def end(self) -> list[Told]:
        """Something else follows."""
        place = self._place
        if place is None:
            return []
        text = "".join(self._text)
        done = place.event("reasoning_summary_text.done", summary_index=0, text=text)
        part = self._part("done", text)
        self._place, self._text = None, []
        summary = [{"type": "summary_text", "text": text}]
        return [done, part, self._output.end(place, summary=summary, status="completed")]

    def _part(self, what: str, text: str) -> Told:
        assert self._place is not None
        part = {"type": "summary_text", "text": text}
        return self._place.event(f"reasoning_summary_part.{what}", summary_index=0, part=part)


class Message:
    """The message: the answer as it is written, or how the model declined."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._place: Place | None = None
        self._parts: list[Told] = []
        self._pieces: list[str] = []
        """The text of the last part."""

    @property
    def began(self) -> bool:
        """Whether anything of it was said."""
        return self._place is not None

    def write(self, text: str, logprobs: Sequence[Told] = ()) -> list[Told]:
        """Go on with the answer."""
        events = self._in_part("output_text")
        self._pieces.append(text)
        return [*events, self._event("output_text.delta", delta=text, logprobs=list(logprobs))]

    def refuse(self, text: str) -> list[Told]:
        """Decline."""
        events = self._in_part("refusal")
        self._pieces.append(text)
        return [*events, self._event("refusal.delta", delta=text)]

    def end(self, annotations: Sequence[Told], logprobs: Sequence[Told], status: str) -> list[Told]:
        """Nothing follows; one of which nothing was said is empty."""
        opening = [] if self._place else self._in_part("output_text")
        assert self._place is not None
        cited = [] if self._is("refusal") else self._cite(annotations, logprobs)
        done = self._end_part()
        return [
            *opening,
            *cited,
            *done,
            self._output.end(self._place, content=self._parts, status=status),
        ]

    def _in_part(self, kind: str) -> list[Told]:
        """Be in a part of that kind."""
        events: list[Told] = []
        if self._place is None:
            item = {"type": "message", "role": "assistant", "content": [], "status": "in_progress"}
            self._place, added = self._output.begin("msg", item)
            events.append(added)
        elif self._is(kind):
            return []
        else:
            events += self._end_part()
        self._parts.append(_empty_part(kind))
        self._pieces = []
        return [*events, self._event("content_part.added", part=self._parts[-1])]

    def _is(self, kind: str) -> bool:
        return bool(self._parts) and self._parts[-1]["type"] == kind

    def _cite(self, annotations: Sequence[Told], logprobs: Sequence[Told]) -> list[Told]:
        cited = {"annotations": list(annotations), "logprobs": list(logprobs)}
        self._parts[-1] = {**self._parts[-1], **cited}
        return [
            self._event("output_text.annotation.added", annotation_index=n, annotation=annotation)
            for n, annotation in enumerate(annotations)
        ]

    def _end_part(self) -> list[Told]:
        text = "".join(self._pieces)
        if self._is("refusal"):
            self._parts[-1] = part = {**self._parts[-1], "refusal": text}
            done = self._event("refusal.done", refusal=text)
        else:
            self._parts[-1] = part = {**self._parts[-1], "text": text}
            done = self._event("output_text.done", text=text, logprobs=part["logprobs"])
        return [done, self._event("content_part.done", part=part)]

    def _event(self, name: str, /, **fields: Any) -> Told:
        assert self._place is not None
        return self._place.event(name, content_index=len(self._parts) - 1, **fields)


def _empty_part(kind: str) -> Told:
    if kind == "refusal":
        return {"type": "refusal", "refusal": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class ClientCall:
    """A call of a tool that the client runs, as it is made: its input is one text."""

    def __init__(self, output: Output, call_id: str, tool: Mapping[str, Any]) -> None:
        """`tool` is how the client has described it."""
        self._output = output
        is_custom = tool["type"] == "custom"
        kind, prefix = ("custom_tool_call", "ctc") if is_custom else ("function_call", "fc")
        self._events = "custom_tool_call_input" if is_custom else "function_call_arguments"
        self._field = "input" if is_custom else "arguments"
        self._named = {} if is_custom else {"name": tool["name"]}
        within = {"namespace": tool["namespace"]} if tool.get("namespace") else {}
        item = {"type": kind, "call_id": call_id, **within, "name": tool["name"], self._field: ""}
        self._place, self.added = output.begin(prefix, {**item, "status": "in_progress"})
        self._pieces: list[str] = []

    def write(self, text: str) -> list[Told]:
        """Go on with the input."""
        self._pieces.append(text)
        return [self._place.event(f"{self._events}.delta", delta=text)]

    def end(self) -> list[Told]:
        """The call is whole."""
        written = {self._field: "".join(self._pieces)}
        done = self._place.event(f"{self._events}.done", **self._named, **written)
        return [done, self._output.end(self._place, **written, status="completed")]

    def abandon(self) -> list[Told]:
        """The call breaks off."""
        written = {self._field: "".join(self._pieces)}
        return [self._output.end(self._place, **written, status="incomplete")]


class ClientCalls:
    """The calls of the client's tools: as the model writes them, and the others whole."""

    def __init__(self, output: Output, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools` are the client's, by name."""
        self._output = output
        self._tools = tools
        self._open: dict[int, ClientCall] = {}
        self._sent = set[str]()

    def event(self, event: ClientCallStarted | ClientCallDelta | ClientCallFinished) -> list[Told]:
        """A piece of one; nothing of those that have more than one text."""
        match event:
            case ClientCallStarted(index, call_id, name) if self._is_text(name):
                self._sent.add(call_id)
                self._open[index] = call = ClientCall(self._output, call_id, self._tools[name])
                return [call.added]
            case ClientCallDelta(index, text) if index in self._open:
                return self._open[index].write(text)
            case ClientCallFinished(index) if index in self._open:
                return self._open.pop(index).end()
        return []

    @property
    def began(self) -> bool:
        """Whether any was sent as the model wrote it."""
        return bool(self._sent)

    def abandon(self) -> list[Told]:
        """Nothing follows of the one that is being written."""
        left, self._open = self._open, {}
        return [told for call in left.values() for told in call.abandon()]

    def whole(self, call: Mapping[str, Any]) -> list[Told]:
        """All of one; nothing where it was sent before."""
        if call["id"] in self._sent:
            return []
        made = call[call["type"]]
        name, written = made["name"], made["input" if call["type"] == "custom" else "arguments"]
        tool = self._tools[name]
        if self._is_text(name):
            item = ClientCall(self._output, call["id"], tool)
            return [item.added, *item.write(written), *item.end()]
        fields = {"call_id": call["id"], **call_fields(tool["type"], written)}
        begun = {"type": f"{tool['type']}_call", "status": "in_progress", **fields}
        place, added = self._output.begin(PREFIXES[tool["type"]], begun)
        return [added, self._output.end(place, status="completed")]

    def _is_text(self, name: str) -> bool:
        return self._tools[name]["type"] not in PREFIXES
