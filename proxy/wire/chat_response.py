"""Chat completions towards the client: the whole one, and the chunks of a streamed one."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from policies.file_names import shown_name
from policies.steps import Steps
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallStarted,
    Event,
    OfChoice,
    Refused,
)
from proxy.agent.result import Artifact, Result
from proxy.agent.result import add
from proxy.wire.efficiency import efficiency
from proxy.wire.json_text import json_text
from proxy.wire.step_events import StepEvents, named
from proxy.wire.step_items import StepItems
from proxy.wire.steps import StepText, extension

_OURS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""What a completion of ours says for itself."""
MAX_LEFT_OUT = 100
"""How many files are named that were not handed back."""
_LARGEST = ("context_tokens", "documents_tokens", "wall_ms", "peak_mem_bytes")
"""What runs beside each other do not add up to."""


def completion(
    result: Result,
    *,
    response_id: str,
    created: int,
    model: str,
    reasoning: str,
    other_reasoning: Sequence[str] = (),
) -> dict[str, Any]:
    """A `chat.completion` object."""
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
    """What the backend said of the answer in fields of its own, such as vLLM's token ids."""
    return _without_nulls(result.choice, {"index", "logprobs"})


def _without_nulls(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names and value is not None}


def _logprobs(logprobs: Any) -> Any:
    """With both lists, of which vLLM knows one."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {"content": None, "refusal": None, **logprobs}


def usage(result: Result) -> dict[str, Any]:
    """OpenAI's usage, summed over the runs, and ours beside it."""
    counted: dict[str, Any] = {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
    }
    tally = result.tally.counts()
    largest = {key: tally[key] for key in _LARGEST}
    for each in (result, *result.others):
        counted = add(counted, each.usage)
    for other in result.others:
        more = other.tally.counts()
        tally = add(tally, more)
        largest = {key: max(largest[key], more[key]) for key in _LARGEST}
    if any(each.tally.cost_usd is None for each in (result, *result.others)):
        tally["cost_usd"] = None
    known = {key: value for key, value in {**tally, **largest}.items() if value is not None}
    return {**counted, "sandbox": efficiency(known)}


def sandbox_object(result: Result) -> dict[str, Any]:
    """What the run did and what it left, for clients that look."""
    shown: dict[str, Any] = {
        "v": 1,
        "run_id": result.run_id,
        "container_id": result.container_id,
        "stop_reason": str(result.stop_reason),
        "route": result.route,
        "steps": result.steps,
        "files": [file_object(artifact) for artifact in result.artifacts],
    }
    if result.origin == "restored":
        shown["restored"] = True
    if result.segments > 1:
        shown["segments"] = result.segments
        shown["compactions"] = [asdict(each) for each in result.compactions]
    if result.notices:
        shown["warnings"] = [asdict(notice) for notice in result.notices]
    if result.left_out:
        shown["files_left_out_count"] = len(result.left_out)
        shown["files_left_out"] = [
            {**asdict(file), "path": _printable(file.path)}
            for file in result.left_out[:MAX_LEFT_OUT]
        ]
    return shown


def file_object(artifact: Artifact) -> dict[str, Any]:
    """One produced file."""
    return {
        "id": artifact.file_id,
        "filename": filename(artifact),
        "path": _printable(artifact.path),
        "bytes": artifact.bytes,
        "mime_type": artifact.mime_type,
        "sha256": artifact.sha256,
        "url": artifact.url,
    }


def annotations(result: Result, before: int = 0) -> list[dict[str, Any]]:
    """One `url_citation` a file, placed where the answer links to it, else at its end; `before` the
    answer the content has so many characters of narration."""
    found = []
    for artifact in result.artifacts:
        start, end = place(result.answer, artifact.url)
        citation = {
            "url": artifact.url,
            "title": filename(artifact),
            "start_index": before + start,
            "end_index": before + end,
        }
        found.append({"type": "url_citation", "url_citation": citation})
    return found


def images(result: Result) -> list[dict[str, Any]]:
    """The pictures small enough to travel inside the message."""
    urls = [artifact.data_url for artifact in result.artifacts if artifact.data_url]
    return [
        {"type": "image_url", "index": index, "image_url": {"url": url}}
        for index, url in enumerate(urls)
    ]


def place(answer: str, url: str) -> tuple[int, int]:
    """Where an answer speaks of a file: the words of the link, the bare URL, else the end."""
    at = answer.find(url)
    if at < 0:
        return len(answer), len(answer)
    label = answer.rfind("[", 0, at)
    if label >= 0 and answer[label:at].endswith("]("):
        return label + 1, at - 2
    return at, at + len(url)


def filename(artifact: Artifact) -> str:
    """What the user is to see it called."""
    return _printable(artifact.filename or shown_name(artifact.path))


def _printable(path: str) -> str:
    return path.encode(errors="replace").decode()


class ChunkWriter:
    """The frames of one streamed completion, as the JSON of each `data:` line."""

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
        """The first frame, sent before anything is known."""
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> list[str]:
        """The frames of an event; none for most."""
        if isinstance(event, OfChoice):
            return self._other(event.index).event(event.event)
        frames = [frame] if (frame := self._spoken(event)) else []
        if self._items:
            frames += [self._beside(keys) for keys in self._items.of(event)]
        if self._events and (told := self._events.of(event)):
            frames.append(named(self._beside({"sandbox": told})))
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
        """A piece of a call. Open WebUI is sent calls whole: it renders its message anew for each
        piece of one, and pieces would shift its cards."""
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
            # Open WebUI would put thinking that follows the answer into the block before it.
            return None
        return self._chunk({"reasoning": text, "reasoning_content": text}, sandbox=sandbox)

    def fail(self, error: Mapping[str, Any]) -> list[str]:
        """What ends a run that failed: steps that were begun, then the error."""
        text = self._steps.abandoned()
        ended = self._thought(text, None) if text else None
        open_items = self._items.abandoned() if self._items else []
        frames = [self._beside(keys) for keys in open_items]
        return [*([ended] if ended else []), *frames, json.dumps(error)]

    def finish(self, result: Result) -> list[str]:
        """What follows the answer: pictures, the client's tool calls, and the frame with the
        finish reason and the files."""
        frames = (
            [self._beside(keys) for keys in self._items.finished(result)] if self._items else []
        )
        if pictures := images(result):
            # In a frame of their own: some clients drop text beside them.
            frames.append(self._chunk({"images": pictures}))
        if result.finish_reason == "function_call":
            frames.append(self._chunk({"function_call": result.tool_calls[0]["function"]}))
        elif result.tool_calls:
            calls = [self._unsent(call, n) for n, call in enumerate(result.tool_calls)]
            if missing := [call for call in calls if len(call) > 1]:
                frames.append(self._chunk({"tool_calls": missing}))
        delta: dict[str, Any] = {}
        if not self._items and (found := annotations(result, result.streamed_before)):
            # Open WebUI would ask Google for the icon of each link, signature and all.
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
        """A client's call without what was sent of it before; its index stays in any case."""
        if call["id"] not in self._sent_calls:
            return {**call, "index": index}
        rest = {key: call[key] for key in call if key not in ("id", "type", "function", "custom")}
        return {"index": index, **rest}

    def _other(self, index: int) -> "ChunkWriter":
        """Who writes the frames of a further choice."""
        if index not in self._others:
            # Open WebUI's cards are of one message.
            steps = "reasoning" if self._profile == "items" else self._profile
            self._others[index] = ChunkWriter(**self._names, steps=steps, index=index)
        return self._others[index]

    def usage(self, result: Result) -> str:
        """The last frame, for clients that asked for it."""
        return f'{self._head}, "choices": [], "usage": {json.dumps(usage(result))}}}'

    def _beside(self, keys: Mapping[str, Any]) -> str:
        """A chunk that says nothing, for those who read what stands beside its choices."""
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
