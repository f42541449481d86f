"""Chat completions towards the client: the whole one, and the chunks of a streamed one."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from policies.steps import Steps
from proxy.agent.events import AnswerDelta, Event
from proxy.agent.task import Artifact, Result
from proxy.wire.json_text import json_text
from proxy.wire.step_events import StepEvents, named
from proxy.wire.step_items import StepItems
from proxy.wire.steps import StepText, extension


def completion(
    result: Result, *, response_id: str, created: int, model: str, reasoning: str
) -> dict[str, Any]:
    """A `chat.completion` object."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": result.answer if result.answer or not result.tool_calls else None,
        "refusal": None,
        "annotations": annotations(result),
    }
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if pictures := images(result):
        message["images"] = pictures
    if result.tool_calls:
        message["tool_calls"] = list(result.tool_calls)
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": result.choice.get("logprobs"),
                "finish_reason": result.finish_reason,
            }
        ],
        "usage": usage(result),
        **_carried(result),
        "sandbox": sandbox_object(result),
    }


def _carried(result: Result) -> dict[str, Any]:
    carried = ("system_fingerprint", "service_tier")
    return {key: result.response[key] for key in carried if result.response.get(key) is not None}


def usage(result: Result) -> dict[str, Any]:
    """OpenAI's usage, summed over the run, and ours beside it."""
    counted = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, **result.usage}
    return {**counted, "sandbox": asdict(result.tally)}


def sandbox_object(result: Result) -> dict[str, Any]:
    """What the run did and what it left, for clients that look."""
    shown: dict[str, Any] = {
        "v": 1,
        "run_id": result.run_id,
        "container_id": result.container_id,
        "stop_reason": str(result.stop_reason),
        "steps": result.tally.tool_calls,
        "files": [file_object(artifact) for artifact in result.artifacts],
    }
    if result.segments > 1:
        shown["segments"] = result.segments
    if result.left_out:
        shown["files_left_out"] = [
            {"path": _printable(file.path), "bytes": file.bytes} for file in result.left_out
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


def annotations(result: Result) -> list[dict[str, Any]]:
    """One `url_citation` a file, placed where the answer links to it, else at its end."""
    found = []
    for artifact in result.artifacts:
        start, end = _place(result.answer, filename(artifact), artifact.url)
        citation = {
            "url": artifact.url,
            "title": filename(artifact),
            "start_index": start,
            "end_index": end,
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


def _place(answer: str, title: str, url: str) -> tuple[int, int]:
    at = answer.find(url)
    if at < 0:
        return len(answer), len(answer)
    label = answer.rfind("[", 0, at)
    if label >= 0 and answer[label:at].endswith("]("):
        return label + 1, at - 2
    return at, at + len(url)


def filename(artifact: Artifact) -> str:
    """The last part of the path, fit to be shown."""
    return _printable(artifact.path.rpartition("/")[2])


def _printable(path: str) -> str:
    return path.encode(errors="replace").decode()


class ChunkWriter:
    """The frames of one streamed completion, as the JSON of each `data:` line."""

    def __init__(
        self, *, response_id: str, created: int, model: str, run_id: str, steps: Steps
    ) -> None:
        self._run_id = run_id
        self._steps = StepText(steps)
        self._items = StepItems(run_id) if steps == "items" else None
        self._events = StepEvents(run_id) if steps == "events" else None
        self._answer_began = False
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
        frames = [frame] if (frame := self._spoken(event)) else []
        if self._items:
            frames += [self._beside(keys) for keys in self._items.of(event)]
        if self._events and (told := self._events.of(event)):
            frames.append(named(told))
        return frames

    def _spoken(self, event: Event) -> str | None:
        if isinstance(event, AnswerDelta):
            self._answer_began = True
            return self._chunk({"content": event.text}, logprobs=event.logprobs)
        text = self._steps.of(event)
        return self._thought(text, extension(event, self._run_id)) if text else None

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
        if result.tool_calls:
            calls = [{**call, "index": n} for n, call in enumerate(result.tool_calls)]
            frames.append(self._chunk({"tool_calls": calls}))
        delta: dict[str, Any] = {}
        if found := annotations(result):
            delta["annotations"] = found
        frames.append(
            self._chunk(delta, finish=result.finish_reason, sandbox=sandbox_object(result))
        )
        return frames

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
    ) -> str:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        extra = f', "sandbox": {json.dumps(sandbox)}' if sandbox else ""
        return f'{self._head}, "choices": [{json.dumps(choice)}]{extra}}}'
