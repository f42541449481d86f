"""The answer of POST /v1/chat/completions, in one piece or streamed.

`ChatEncoder` turns the events of a run into the chunks of a stream. `StreamedCompletion` writes
these as server-sent events; `WholeCompletion` takes the thinking and the steps from them, and
builds the JSON object around the run's result.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypedDict

from policies.steps import StepsMode
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ChoiceEvent,
    ClientCallDelta,
    ClientCallStarted,
    Event,
    Refused,
)
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.schemas.result_objects import annotations, images, json_text, sandbox_object, usage
from proxy.schemas.steps import (
    EVENT_NAME,
    AnswerState,
    Keys,
    StepCardRenderer,
    StepEventRenderer,
    StepTextRenderer,
    extension,
)

_OURS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields that the proxy sets itself; the backend's are dropped."""
_DONE = "data: [DONE]\n\n"


class CompletionHead(TypedDict):
    """The fields at the top of a completion and of each chunk."""

    response_id: str
    created: int
    model: str


def head(run_id: str, created: int, model: str) -> CompletionHead:
    """Return the head of a run's completion, the same for each of its subscribers."""
    return CompletionHead(response_id=f"chatcmpl-{run_id}", created=created, model=model)


class Chunk(NamedTuple):
    """A chunk without its head. Chunks that tell of steps have an empty delta."""

    choice: dict[str, Any]
    sandbox: Mapping[str, Any] | None = None
    """The `sandbox` object beside the choice."""
    card: Keys | None = None
    """Keys beside the choice, from which Open WebUI makes a card."""
    step: Mapping[str, Any] | None = None
    """A step as the `sandbox` object of a chunk that is a server-sent event with a name."""


class ChatEncoder:
    """Turns the events of one choice into chunks."""

    def __init__(self, run_id: str, steps: StepsMode, index: int = 0) -> None:
        self._run_id = run_id
        self._index = index
        self._state = AnswerState()
        self._text = StepTextRenderer(steps, self._state)
        self._cards = StepCardRenderer(run_id, self._state) if steps == "items" else None
        self._steps = StepEventRenderer(run_id) if steps == "events" else None
        self._call_fields: dict[int, tuple[str, str]] = {}
        """The key and the field that hold the pieces of each call, by the call's index."""
        self._opening: dict[str, Any] = {"role": "assistant"} if index else {}
        """Fields to add to the next delta. The first choice's role is in a chunk of its own."""

    def begin(self) -> Chunk:
        """Return the first chunk, which is sent before the run has begun."""
        return self._chunk({"role": "assistant", "content": ""})

    def encode(self, event: Event) -> list[Chunk]:
        """Return the chunks of an event, mostly none."""
        chunks = self._said(event)
        if self._cards:
            chunks += [self._chunk({}, card=keys) for keys in self._cards.render(event)]
        if self._steps and (step := self._steps.render(event)):
            chunks.append(self._chunk({}, step=step))
        self._state.update(event)
        return chunks

    def finish(self, result: Result) -> list[Chunk]:
        """Return the chunks after the answer: pictures, the client's tool calls, and the chunk with
        the finish reason and the files."""
        cards = self._cards.finish(result) if self._cards else []
        chunks = [self._chunk({}, card=keys) for keys in cards]
        if pictures := images(result):
            # In a chunk of their own: some clients drop text beside them.
            chunks.append(self._chunk({"images": pictures}))
        if result.finish_reason == "function_call":
            chunks.append(self._chunk({"function_call": result.tool_calls[0]["function"]}))
        elif result.tool_calls:
            calls = [self._unsent(call, n) for n, call in enumerate(result.tool_calls)]
            if missing := [call for call in calls if len(call) > 1]:
                chunks.append(self._chunk({"tool_calls": missing}))
        delta: dict[str, Any] = {}
        if not self._cards and (found := annotations(result, result.streamed_before)):
            # Open WebUI would ask Google for the icon of each link, with its signature.
            delta["annotations"] = found
        last = self._chunk(delta, sandbox=sandbox_object(result))
        last.choice.update({"finish_reason": result.finish_reason, **_backend_fields(result)})
        return [*chunks, last]

    def abandon(self) -> list[Chunk]:
        """Return the chunks that close the open step of a failed run."""
        cards = self._cards.abandon() if self._cards else []
        return [
            *self._thought(self._text.abandon()),
            *(self._chunk({}, card=keys) for keys in cards),
        ]

    def _said(self, event: Event) -> list[Chunk]:
        """Return the chunk of the model's words, of a call, or of a step as text."""
        match event:
            case AnswerDelta(text, logprobs):
                chunk = self._chunk({"content": text})
                if logprobs is not None:
                    chunk.choice["logprobs"] = _logprobs(logprobs)
                return [chunk]
            case Refused(text):
                return [self._chunk({"refusal": text})]
            case ClientCallStarted() | ClientCallDelta():
                return self._client_call(event)
        return self._thought(self._text.render(event), event)

    def _thought(self, text: str, event: Event | None = None) -> list[Chunk]:
        if not text:
            return []
        sandbox = extension(event, self._run_id) if event else None
        return [self._chunk({"reasoning": text, "reasoning_content": text}, sandbox=sandbox)]

    def _client_call(self, event: ClientCallStarted | ClientCallDelta) -> list[Chunk]:
        """Return the chunk of a piece of a call. Open WebUI gets calls complete: it renders its
        message anew for each piece, which would move its cards."""
        if self._cards:
            return []
        if isinstance(event, ClientCallStarted):
            kind, field = ("custom", "input") if event.takes_text else ("function", "arguments")
            self._state.sent_calls.add(event.call_id)
            self._call_fields[event.index] = kind, field
            made: dict[str, Any] = {"name": event.name, field: ""}
            piece = {"id": event.call_id, "type": kind, kind: made}
        else:
            kind, field = self._call_fields.get(event.index, ("function", "arguments"))
            piece = {kind: {field: event.text}}
        return [self._chunk({"tool_calls": [{"index": event.index, **piece}]})]

    def _unsent(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return a client's call without the fields that were sent before, but with its index."""
        if call["id"] not in self._state.sent_calls:
            return {**call, "index": index}
        rest = {key: call[key] for key in call if key not in ("id", "type", "function", "custom")}
        return {"index": index, **rest}

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        sandbox: Mapping[str, Any] | None = None,
        card: Keys | None = None,
        step: Mapping[str, Any] | None = None,
    ) -> Chunk:
        if self._opening:
            delta, self._opening = {**self._opening, **delta}, {}
        choice = {"index": self._index, "delta": delta, "finish_reason": None}
        return Chunk(choice, sandbox, card, step)


class StreamedCompletion:
    """Writes the frames of a streamed answer."""

    def __init__(
        self, head: CompletionHead, run_id: str, steps: StepsMode, *, wants_usage: bool
    ) -> None:
        self._run_id = run_id
        self._wants_usage = wants_usage
        self._choices = {0: ChatEncoder(run_id, steps)}
        # Open WebUI's cards are of one message.
        self._steps_of_others: StepsMode = "reasoning" if steps == "items" else steps
        self._head = json.dumps(
            {
                "id": head["response_id"],
                "object": "chat.completion.chunk",
                "created": head["created"],
                "model": head["model"],
            }
        )[:-1]

    def begin(self) -> str:
        return self._frame(self._choices[0].begin())

    def event(self, event: Event) -> str:
        if isinstance(event, ChoiceEvent):
            chunks = self._choice(event.index).encode(event.event)
        else:
            chunks = self._choices[0].encode(event)
        return "".join(map(self._frame, chunks))

    def finish(self, result: Result) -> str:
        chunks = [
            chunk
            for index, each in enumerate((result, *result.others))
            for chunk in self._choice(index).finish(each)
        ]
        frames = [self._frame(chunk) for chunk in chunks]
        if self._wants_usage:
            counted = json.dumps(usage(result))
            frames.append(f'data: {self._head}, "choices": [], "usage": {counted}}}\n\n')
        return "".join([*frames, _DONE])

    def fail(self, error: ProxyError) -> str:
        chunks = self._choices[0].abandon()
        return "".join([*map(self._frame, chunks), f"data: {json.dumps(error.body())}\n\n", _DONE])

    def _choice(self, index: int) -> ChatEncoder:
        if index not in self._choices:
            self._choices[index] = ChatEncoder(self._run_id, self._steps_of_others, index)
        return self._choices[index]

    def _frame(self, chunk: Chunk) -> str:
        name = extra = ""
        if chunk.sandbox:
            extra = f', "sandbox": {json.dumps(chunk.sandbox)}'
        elif chunk.card:
            extra = f", {json_text(chunk.card)[1:-1]}"
        elif chunk.step:
            # Clients ignore a server-sent event whose name they do not know.
            name, extra = f"event: {EVENT_NAME}\n", f', "sandbox": {json_text(chunk.step)}'
        return f'{name}data: {self._head}, "choices": [{json.dumps(chunk.choice)}]{extra}}}\n\n'


class WholeCompletion:
    """Builds the answer in one piece. Of the stream it has the thinking and the steps; the final
    answer is in the result."""

    def __init__(self, head: CompletionHead, run_id: str, steps: StepsMode) -> None:
        self._head = head
        self._profile = steps
        self._encoders = defaultdict[int, ChatEncoder](lambda: ChatEncoder(run_id, steps))
        self._thinking = defaultdict[int, list[str]](list)
        self._steps = defaultdict[int, list[Mapping[str, Any]]](list)

    def event(self, event: Event) -> None:
        index, event = (event.index, event.event) if isinstance(event, ChoiceEvent) else (0, event)
        if isinstance(event, AnswerDelta | AnswerRestarted):
            return
        for chunk in self._encoders[index].encode(event):
            if thinking := chunk.choice["delta"].get("reasoning"):
                self._thinking[index].append(thinking)
            if step := _complete_step(chunk):
                self._steps[index].append(step)

    def finish(self, result: Result) -> dict[str, Any]:
        results = [result, *result.others]
        choices = [self._choice(index, each) for index, each in enumerate(results)]
        if result.others:
            for index, each in enumerate(results):
                choices[index]["sandbox"] = self._sandbox(index, each)
        return {
            "id": self._head["response_id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": choices,
            "usage": usage(result),
            **_without_nulls(result.response, _OURS),
            "sandbox": self._sandbox(0, result),
        }

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        return error.body()

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        silent = not result.answer and (result.tool_calls or result.refusal)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if silent else result.answer,
            "refusal": result.refusal,
            "annotations": annotations(result),
        }
        if thinking := "".join(self._thinking[index]):
            message |= {"reasoning": thinking, "reasoning_content": thinking}
        if pictures := images(result):
            message["images"] = pictures
        if result.finish_reason == "function_call":
            message["function_call"] = result.tool_calls[0]["function"]
        elif result.tool_calls:
            message["tool_calls"] = list(result.tool_calls)
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(result.choice.get("logprobs")),
            "finish_reason": result.finish_reason,
            **_backend_fields(result),
        }

    def _sandbox(self, index: int, result: Result) -> dict[str, Any]:
        """Return the `sandbox` object, with the steps in a field named after the profile."""
        if self._profile not in ("items", "events"):
            return sandbox_object(result)
        return {**sandbox_object(result), self._profile: self._steps[index]}


def _complete_step(chunk: Chunk) -> Mapping[str, Any] | None:
    """Return the step in a chunk, unless the chunk has only a part of it, such as live output."""
    if chunk.card:
        item: Mapping[str, Any] = chunk.card.get("item", {})
        return item if item.get("status") == "completed" else None
    return chunk.step if chunk.step and chunk.step["kind"] != "tool_output" else None


def _backend_fields(result: Result) -> dict[str, Any]:
    """Return the backend's own fields of the choice, such as vLLM's token ids."""
    return _without_nulls(result.choice, {"index", "logprobs"})


def _without_nulls(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names and value is not None}


def _logprobs(logprobs: Any) -> Any:
    """Return `logprobs` with both lists: vLLM sends one of them."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {"content": None, "refusal": None, **logprobs}
