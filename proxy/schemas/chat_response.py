"""The response of POST /v1/chat/completions, as one JSON object or as a stream.

`ChatEncoder` turns the events of a run into chunks. `CompletionStreamEncoder` writes the chunks as
server-sent events. `ChatCompletionBuilder` takes the reasoning and the steps from the chunks, and
the rest of the JSON object from the run's result.
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
    ModelRefused,
)
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.schemas.answer_objects import (
    CardFields,
    ChoiceExtension,
    MessageExtension,
    SandboxObject,
    StepStreamEvent,
)
from proxy.schemas.result_objects import images, json_text, sandbox_object, url_citations, usage
from proxy.schemas.steps import (
    AnswerState,
    StepCardRenderer,
    StepEventRenderer,
    StepTextRenderer,
    step_extension,
)

_PROXY_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields that the proxy sets itself. The backend's values are dropped."""
_DONE = "data: [DONE]\n\n"


class CompletionHead(TypedDict):
    """The top-level fields that a completion and its chunks share."""

    response_id: str
    created: int
    model: str


def completion_head(run_id: str, created: int, model: str) -> CompletionHead:
    """Return the head of a run's completion. It is the same for each subscriber of the run."""
    return CompletionHead(response_id=f"chatcmpl-{run_id}", created=created, model=model)


class Chunk(NamedTuple):
    """A chunk without its head. A chunk with a card or a step event has an empty delta."""

    choice: dict[str, Any]
    sandbox: Mapping[str, Any] | None = None
    """The `sandbox` object that the chunk has in addition to the choice."""
    card: CardFields | None = None
    """Top-level fields from which Open WebUI makes a card."""
    step: Mapping[str, Any] | None = None
    """A step event, sent as the `sandbox` object of a chunk. The chunk's server-sent event has a
    name."""


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
        """The names of two nested fields of each streamed call, by the call's index. The pieces of
        the call are in the inner field. The names are `function` and `arguments`, or `custom` and
        `input` for a custom tool."""
        self._opening_fields: dict[str, Any] = {"role": "assistant"} if index else {}
        """Fields to add to the next delta. The first choice's role is in a chunk of its own."""

    def begin(self) -> Chunk:
        """Return the first chunk of the stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def encode(self, event: Event) -> list[Chunk]:
        """Return the chunks of an event. Most events have none."""
        chunks = self._encode_output(event)
        if self._cards:
            chunks += [self._chunk({}, card=card) for card in self._cards.render(event)]
        if self._steps and (step := self._steps.render(event)):
            chunks.append(self._chunk({}, step=step))
        self._state.update(event)
        return chunks

    def finish(self, result: Result) -> list[Chunk]:
        """Return the chunks after the answer: cards, images, the client's tool calls, and the chunk
        with the finish reason and the files."""
        cards = self._cards.finish(result) if self._cards else []
        chunks = [self._chunk({}, card=card) for card in cards]
        if found_images := images(result):
            # Some clients drop text in a chunk with images.
            chunks.append(self._chunk(MessageExtension(images=found_images)))
        if result.finish_reason == "function_call":
            chunks.append(self._chunk({"function_call": result.client_calls[0]["function"]}))
        elif result.client_calls:
            calls = [self._unsent_fields(call, n) for n, call in enumerate(result.client_calls)]
            if unsent := [call for call in calls if len(call) > 1]:
                chunks.append(self._chunk({"tool_calls": unsent}))
        delta: dict[str, Any] = {}
        if not self._cards and (found := url_citations(result, result.answer_offset)):
            # Open WebUI asks Google for the icon of each cited URL, which has a signature.
            delta["annotations"] = found
        last = self._chunk(delta, sandbox=sandbox_object(result))
        last.choice.update({"finish_reason": result.finish_reason, **_backend_fields(result)})
        return [*chunks, last]

    def close_after_failure(self) -> list[Chunk]:
        """Return the chunks that close the open step of a failed run."""
        cards = self._cards.close_after_failure() if self._cards else []
        chunks = self._reasoning_chunks(self._text.close_after_failure())
        return [*chunks, *(self._chunk({}, card=card) for card in cards)]

    def _encode_output(self, event: Event) -> list[Chunk]:
        """Return the chunk of an event with the model's output, or with a step that is shown as
        text."""
        match event:
            case AnswerDelta(text, logprobs):
                chunk = self._chunk({"content": text})
                if logprobs is not None:
                    chunk.choice["logprobs"] = _complete_logprobs(logprobs)
                return [chunk]
            case ModelRefused(text):
                return [self._chunk({"refusal": text})]
            case ClientCallStarted() | ClientCallDelta():
                return self._client_call_chunks(event)
        return self._reasoning_chunks(self._text.render(event), event)

    def _reasoning_chunks(self, text: str, event: Event | None = None) -> list[Chunk]:
        if not text:
            return []
        sandbox = step_extension(event, self._run_id) if event else None
        delta = MessageExtension(reasoning=text, reasoning_content=text)
        return [self._chunk(delta, sandbox=sandbox)]

    def _client_call_chunks(self, event: ClientCallStarted | ClientCallDelta) -> list[Chunk]:
        """Return the chunk of a piece of a call. With cards, return no chunk: Open WebUI would
        render the message again for each piece and move the cards, so it gets complete calls at the
        end."""
        if self._cards:
            return []
        if isinstance(event, ClientCallStarted):
            kind, field = ("custom", "input") if event.takes_text else ("function", "arguments")
            self._state.sent_call_ids.add(event.call_id)
            self._call_fields[event.index] = kind, field
            made: dict[str, Any] = {"name": event.name, field: ""}
            piece = {"id": event.call_id, "type": kind, kind: made}
        else:
            kind, field = self._call_fields.get(event.index, ("function", "arguments"))
            piece = {kind: {field: event.text}}
        return [self._chunk({"tool_calls": [{"index": event.index, **piece}]})]

    def _unsent_fields(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return a client's call with its index. If the call was streamed, the fields that were
        sent are left out."""
        if call["id"] not in self._state.sent_call_ids:
            return {**call, "index": index}
        rest = {key: call[key] for key in call if key not in ("id", "type", "function", "custom")}
        return {"index": index, **rest}

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        sandbox: Mapping[str, Any] | None = None,
        card: CardFields | None = None,
        step: Mapping[str, Any] | None = None,
    ) -> Chunk:
        if self._opening_fields:
            delta, self._opening_fields = {**self._opening_fields, **delta}, {}
        choice = {"index": self._index, "delta": delta, "finish_reason": None}
        return Chunk(choice, sandbox, card, step)


class CompletionStreamEncoder:
    """Writes the chunks of all choices as server-sent events."""

    def __init__(
        self, head: CompletionHead, run_id: str, steps: StepsMode, *, include_usage: bool
    ) -> None:
        self._run_id = run_id
        self._include_usage = include_usage
        self._choices = {0: ChatEncoder(run_id, steps)}
        # Open WebUI shows cards for one choice only.
        self._steps_mode_of_other_choices: StepsMode = "reasoning" if steps == "items" else steps
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

    def encode(self, event: Event) -> str:
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
        if self._include_usage:
            counted = json.dumps(usage(result))
            frames.append(f'data: {self._head}, "choices": [], "usage": {counted}}}\n\n')
        return "".join([*frames, _DONE])

    def fail(self, error: ProxyError) -> str:
        chunks = self._choices[0].close_after_failure()
        return "".join([*map(self._frame, chunks), f"data: {json.dumps(error.body())}\n\n", _DONE])

    def _choice(self, index: int) -> ChatEncoder:
        if index not in self._choices:
            self._choices[index] = ChatEncoder(
                self._run_id, self._steps_mode_of_other_choices, index
            )
        return self._choices[index]

    def _frame(self, chunk: Chunk) -> str:
        name = extra = ""
        if chunk.sandbox:
            extra = f', "sandbox": {json.dumps(chunk.sandbox)}'
        elif chunk.card:
            extra = f", {json_text(chunk.card)[1:-1]}"
        elif chunk.step:
            # Clients ignore server-sent events with an unknown name.
            name, extra = (
                f"event: {StepStreamEvent.CHAT_COMPLETIONS}\n",
                f', "sandbox": {json_text(chunk.step)}',
            )
        return f'{name}data: {self._head}, "choices": [{json.dumps(chunk.choice)}]{extra}}}\n\n'


class ChatCompletionBuilder:
    """Builds the completion as one JSON object. The reasoning and the steps come from the chunks,
    the rest from the run's result."""

    def __init__(self, head: CompletionHead, run_id: str, steps: StepsMode) -> None:
        self._head = head
        self._steps_mode = steps
        self._encoders = defaultdict[int, ChatEncoder](lambda: ChatEncoder(run_id, steps))
        self._reasoning = defaultdict[int, list[str]](list)
        self._steps = defaultdict[int, list[Mapping[str, Any]]](list)

    def add_event(self, event: Event) -> None:
        index, event = (event.index, event.event) if isinstance(event, ChoiceEvent) else (0, event)
        if isinstance(event, AnswerDelta | AnswerRestarted):
            return
        for chunk in self._encoders[index].encode(event):
            if reasoning := chunk.choice["delta"].get("reasoning"):
                self._reasoning[index].append(reasoning)
            if step := _step_if_complete(chunk):
                self._steps[index].append(step)

    def finish(self, result: Result) -> dict[str, Any]:
        results = [result, *result.others]
        choices = [self._choice(index, each) for index, each in enumerate(results)]
        if result.others:
            for index, choice in enumerate(choices):
                choice.update(ChoiceExtension(sandbox=self._sandbox(index, results[index])))
        return {
            "id": self._head["response_id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": choices,
            "usage": usage(result),
            **_without_nulls(result.response, _PROXY_FIELDS),
            "sandbox": self._sandbox(0, result),
        }

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        return error.body()

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        has_no_text = not result.answer and (result.client_calls or result.refusal)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_no_text else result.answer,
            "refusal": result.refusal,
            "annotations": url_citations(result),
        }
        if reasoning := "".join(self._reasoning[index]):
            message.update(MessageExtension(reasoning=reasoning, reasoning_content=reasoning))
        if found_images := images(result):
            message.update(MessageExtension(images=found_images))
        if result.finish_reason == "function_call":
            message["function_call"] = result.client_calls[0]["function"]
        elif result.client_calls:
            message["tool_calls"] = list(result.client_calls)
        return {
            "index": index,
            "message": message,
            "logprobs": _complete_logprobs(result.choice.get("logprobs")),
            "finish_reason": result.finish_reason,
            **_backend_fields(result),
        }

    def _sandbox(self, index: int, result: Result) -> SandboxObject:
        """Return the `sandbox` object. In the steps modes `items` and `events`, the steps are in
        the field of that name."""
        sandbox = sandbox_object(result)
        if self._steps_mode == "items" or self._steps_mode == "events":
            sandbox[self._steps_mode] = self._steps[index]
        return sandbox


def _step_if_complete(chunk: Chunk) -> Mapping[str, Any] | None:
    """Return the step in a chunk, or None if the chunk has only a part of a step."""
    if chunk.card:
        item: Mapping[str, Any] = chunk.card.get("item", {})
        return item if item.get("status") == "completed" else None
    return chunk.step if chunk.step and chunk.step["kind"] != "tool_output" else None


def _backend_fields(result: Result) -> dict[str, Any]:
    """Return the backend's own fields of the choice, such as vLLM's token ids."""
    return _without_nulls(result.choice, {"index", "logprobs"})


def _without_nulls(fields: Mapping[str, Any], excluded_names: Collection[str]) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields.items()
        if key not in excluded_names and value is not None
    }


def _complete_logprobs(logprobs: Any) -> Any:
    """Return `logprobs` with both of OpenAI's lists, `content` and `refusal`. vLLM sends only one
    list."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {"content": None, "refusal": None, **logprobs}
