"""The answer of POST /v1/chat/completions, in one piece or streamed.

`WholeCompletion` and `StreamedCompletion` turn the events of a run into the JSON object or the
frames of the answer. `ChunkWriter` writes the chunks of a stream.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from policies.steps import Steps, is_shown
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallStarted,
    Event,
    OfChoice,
    Refused,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.wire.result_objects import annotations, images, json_text, sandbox_object, usage
from proxy.wire.steps import (
    EVENT_NAME,
    StepEvents,
    StepItems,
    StepText,
    call_item,
    extension,
    output_item,
)

_OURS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields that the proxy sets itself; the backend's are dropped."""


def completion(
    result: Result,
    *,
    response_id: str,
    created: int,
    model: str,
    reasoning: str,
    other_reasoning: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a `chat.completion` object."""
    results = [result, *result.others]
    thoughts = [reasoning, *other_reasoning, *[""] * len(result.others)]
    choices = [
        _choice(each, index, thought)
        for index, (each, thought) in enumerate(zip(results, thoughts, strict=False))
    ]
    if result.others:
        for choice, each in zip(choices, results, strict=True):
            choice["sandbox"] = sandbox_object(each)
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(result),
        **_without_nulls(result.response, _OURS),
        "sandbox": sandbox_object(result),
    }


def _choice(result: Result, index: int, reasoning: str) -> dict[str, Any]:
    silent = not result.answer and (result.tool_calls or result.refusal)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if silent else result.answer,
        "refusal": result.refusal,
        "annotations": annotations(result),
    }
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
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
        **_beside(result),
    }


def _beside(result: Result) -> dict[str, Any]:
    """Return the backend's own fields of the choice, such as vLLM's token ids."""
    return _without_nulls(result.choice, {"index", "logprobs"})


def _without_nulls(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names and value is not None}


def _logprobs(logprobs: Any) -> Any:
    """Return `logprobs` with both lists: vLLM sends one of them."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {"content": None, "refusal": None, **logprobs}


class ChunkWriter:
    """Writes the chunks of one streamed completion, each as the JSON of a `data:` line."""

    def __init__(
        self,
        *,
        response_id: str,
        created: int,
        model: str,
        run_id: str,
        steps: Steps,
        index: int = 0,
    ) -> None:
        self._run_id = run_id
        self._profile = steps
        self._steps = StepText(steps)
        self._items = StepItems(run_id) if steps == "items" else None
        self._events = StepEvents(run_id) if steps == "events" else None
        self._answer_began = False
        self._sent_calls = set[str]()
        """The ids of the client's calls that were sent as the model wrote them."""
        self._call_fields: dict[int, tuple[str, str]] = {}
        """The key and the field that hold the pieces of each call, by the call's index."""
        self._index = index
        self._others: dict[int, ChunkWriter] = {}
        self._opening: dict[str, Any] = {"role": "assistant"} if index else {}
        self._names: dict[str, Any] = {
            "response_id": response_id,
            "created": created,
            "model": model,
            "run_id": run_id,
        }
        self._head = json.dumps(
            {
                "id": response_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
            }
        )[:-1]

    def role(self) -> str:
        """Return the first chunk, which is sent before the run has begun."""
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> list[str]:
        """Return the chunks of an event, mostly none."""
        if isinstance(event, OfChoice):
            return self._other(event.index).event(event.event)
        frames = [frame] if (frame := self._spoken(event)) else []
        if self._items:
            frames += [self._beside(keys) for keys in self._items.of(event)]
        if self._events and (told := self._events.of(event)):
            # As an event with a name, which clients that do not know it ignore.
            frames.append(f"event: {EVENT_NAME}\ndata: {self._beside({'sandbox': told})}")
        return frames

    def _spoken(self, event: Event) -> str | None:
        if isinstance(event, Refused):
            return self._chunk({"refusal": event.text})
        if isinstance(event, AnswerDelta):
            self._answer_began = True
            return self._chunk({"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, AnswerRestarted):
            self._answer_began = False  # what was sent was narration: steps follow it
        if isinstance(event, ClientCallStarted | ClientCallDelta):
            return self._client_call(event)
        text = self._steps.of(event)
        return self._thought(text, extension(event, self._run_id)) if text else None

    def _client_call(self, event: ClientCallStarted | ClientCallDelta) -> str | None:
        """Return the chunk of a piece of a call. Open WebUI gets calls complete: it renders its
        message anew for each piece, which would move its cards."""
        if self._items:
            return None
        if isinstance(event, ClientCallStarted):
            kind, field = ("custom", "input") if event.takes_text else ("function", "arguments")
            self._sent_calls.add(event.call_id)
            self._call_fields[event.index] = kind, field
            made: dict[str, Any] = {"name": event.name, field: ""}
            piece = {"id": event.call_id, "type": kind, kind: made}
        else:
            kind, field = self._call_fields.get(event.index, ("function", "arguments"))
            piece = {kind: {field: event.text}}
        return self._chunk({"tool_calls": [{"index": event.index, **piece}]})

    def _thought(self, text: str, sandbox: Mapping[str, Any] | None) -> str | None:
        if self._answer_began:
            # Open WebUI would put thinking after the answer into the block before the answer.
            return None
        return self._chunk({"reasoning": text, "reasoning_content": text}, sandbox=sandbox)

    def fail(self, error: Mapping[str, Any]) -> list[str]:
        """Return the chunks that end a failed run: the end of open steps, then the error."""
        text = self._steps.abandoned()
        ended = self._thought(text, None) if text else None
        open_items = self._items.abandoned() if self._items else []
        frames = [self._beside(keys) for keys in open_items]
        return [*([ended] if ended else []), *frames, json.dumps(error)]

    def finish(self, result: Result) -> list[str]:
        """Return the chunks after the answer: pictures, the client's tool calls, and the chunk with
        the finish reason and the files."""
        frames = (
            [self._beside(keys) for keys in self._items.finished(result)] if self._items else []
        )
        if pictures := images(result):
            # In a chunk of their own: some clients drop text beside them.
            frames.append(self._chunk({"images": pictures}))
        if result.finish_reason == "function_call":
            frames.append(self._chunk({"function_call": result.tool_calls[0]["function"]}))
        elif result.tool_calls:
            calls = [self._unsent(call, n) for n, call in enumerate(result.tool_calls)]
            if missing := [call for call in calls if len(call) > 1]:
                frames.append(self._chunk({"tool_calls": missing}))
        delta: dict[str, Any] = {}
        if not self._items and (found := annotations(result, result.streamed_before)):
            # Open WebUI would ask Google for the icon of each link, with its signature.
            delta["annotations"] = found
        frames.append(
            self._chunk(
                delta,
                finish=result.finish_reason,
                sandbox=sandbox_object(result),
                beside=_beside(result),
            )
        )
        for index, other in enumerate(result.others, 1):
            frames += self._other(index).finish(other)
        return frames

    def _unsent(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return a client's call without the fields that were sent before, but with its index."""
        if call["id"] not in self._sent_calls:
            return {**call, "index": index}
        rest = {key: call[key] for key in call if key not in ("id", "type", "function", "custom")}
        return {"index": index, **rest}

    def _other(self, index: int) -> "ChunkWriter":
        """Return the writer of a further choice."""
        if index not in self._others:
            # Open WebUI's cards are of one message.
            steps = "reasoning" if self._profile == "items" else self._profile
            self._others[index] = ChunkWriter(**self._names, steps=steps, index=index)
        return self._others[index]

    def usage(self, result: Result) -> str:
        """Return the usage chunk, for clients that asked for it."""
        return f'{self._head}, "choices": [], "usage": {json.dumps(usage(result))}}}'

    def _beside(self, keys: Mapping[str, Any]) -> str:
        """Return a chunk with an empty delta and further keys beside `choices`."""
        return f"{self._chunk({})[:-1]}, {json_text(keys)[1:]}"

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        finish: str | None = None,
        logprobs: Any = None,
        sandbox: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> str:
        delta, self._opening = {**self._opening, **delta}, {}
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = _logprobs(logprobs)
        choice |= beside or {}
        extra = f', "sandbox": {json.dumps(sandbox)}' if sandbox else ""
        return f'{self._head}, "choices": [{json.dumps(choice)}]{extra}}}'


class _ChoiceSteps:
    """The steps and the thinking of one choice of an answer in one piece."""

    def __init__(self, steps: Steps, run_id: str) -> None:
        self._steps = steps
        self._run_id = run_id
        self._text = StepText(steps)
        self._events = StepEvents(run_id)
        self._thinking: list[str] = []
        self._shown: list[dict[str, Any]] = []

    def take(self, event: Event) -> None:
        """Record what the client sees of an event."""
        self._thinking.append(self._text.of(event))
        if self._steps == "items":
            self._take_item(event)
        elif self._steps == "events" and not isinstance(event, ToolOutput):
            told = self._events.of(event)
            self._shown += [told] if told else []

    def _take_item(self, event: Event) -> None:
        if isinstance(event, ToolCallStarted) and is_shown(event.name):
            self._shown.append(call_item(event, self._run_id))
        elif isinstance(event, ToolCallFinished) and is_shown(event.name):
            self._shown.append(output_item(event.step, self._run_id, event.observation))

    @property
    def thinking(self) -> str:
        """The `reasoning` of the message."""
        return "".join(self._thinking)

    @property
    def beside(self) -> dict[str, Any]:
        """The fields of the `sandbox` object, named after the profile."""
        return {self._steps: self._shown} if self._steps in ("items", "events") else {}


class Head(TypedDict):
    """The fields at the top of a completion and of each chunk."""

    response_id: str
    created: int
    model: str


def head(run_id: str, created: int, model: str) -> Head:
    """Return the head of a run's completion, the same for each of its subscribers."""
    return Head(response_id=f"chatcmpl-{run_id}", created=created, model=model)


class WholeCompletion:
    """Builds the answer in one piece."""

    def __init__(self, head: Head, run_id: str, steps: Steps) -> None:
        self._head = head
        self._choices = defaultdict[int, _ChoiceSteps](lambda: _ChoiceSteps(steps, run_id))

    def event(self, event: Event) -> None:
        """See Document."""
        if isinstance(event, OfChoice):
            self._choices[event.index].take(event.event)
        else:
            self._choices[0].take(event)

    def finish(self, result: Result) -> dict[str, Any]:
        """See Document."""
        others = [self._choices[index].thinking for index, _ in enumerate(result.others, 1)]
        reasoning = self._choices[0].thinking
        content = completion(result, **self._head, reasoning=reasoning, other_reasoning=others)
        content["sandbox"] |= self._choices[0].beside
        for choice in content["choices"] if result.others else ():
            choice["sandbox"] |= self._choices[choice["index"]].beside
        return content

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """See Document."""
        return error.body()


class StreamedCompletion:
    """Writes the frames of a streamed answer."""

    def __init__(self, head: Head, run_id: str, steps: Steps, *, wants_usage: bool) -> None:
        self._chunks = ChunkWriter(**head, run_id=run_id, steps=steps)
        self._wants_usage = wants_usage

    def begin(self) -> str:
        """See Frames."""
        return _data(self._chunks.role())

    def event(self, event: Event) -> str:
        """See Frames."""
        return "".join(map(_data, self._chunks.event(event)))

    def finish(self, result: Result) -> str:
        """See Frames."""
        usages = [self._chunks.usage(result)] if self._wants_usage else []
        return "".join(map(_data, [*self._chunks.finish(result), *usages, "[DONE]"]))

    def fail(self, error: ProxyError) -> str:
        """See Frames."""
        return "".join(map(_data, [*self._chunks.fail(error.body()), "[DONE]"]))


def _data(frame: str) -> str:
    named = frame.startswith("event: ")
    return f"{'' if named else 'data: '}{frame}\n\n"
