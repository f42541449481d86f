"""Steps as server-sent events."""

import json
from typing import Any

from proxy.agent.events import (
    AnswerDelta,
    Event,
    FileProduced,
    ReasoningDelta,
    RunStarted,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.schemas.chat_response import CompletionStreamEncoder, completion_head
from proxy.schemas.steps import MAX_OUTPUT_CHARS

STARTED = ToolCallStarted(1, "the-models-own", "execute_bash", {"command": "ls"})


def frames_of(*events: Event) -> list[str]:
    encoder = CompletionStreamEncoder(
        completion_head("r1", 7, "m"), "r1", "events", include_usage=False
    )
    frames = "".join(map(encoder.encode, events)).split("\n\n")
    return [frame.removeprefix("data: ") for frame in frames if frame]


def step_objects(*events: Event) -> list[dict[str, Any]]:
    """Return the `sandbox` objects of the step events."""
    found = [frame.partition("\ndata: ") for frame in frames_of(*events)]
    chunks = [json.loads(data) for name, _, data in found if name == "event: sandbox.step"]
    assert all(chunk["choices"][0]["delta"] == {} for chunk in chunks)
    return [chunk["sandbox"] for chunk in chunks]


def test_step_event_has_an_empty_delta() -> None:
    (frame,) = frames_of(RunStarted("r1"))
    name, _, data = frame.partition("\ndata: ")
    assert name == "event: sandbox.step"
    assert json.loads(data) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        "sandbox": {"v": 1, "run_id": "r1", "kind": "run_started"},
    }


def test_reasoning_and_answer_are_streamed_as_ordinary_chunks() -> None:
    found = frames_of(ReasoningDelta("Hm."), STARTED, AnswerDelta("42"), TurnStarted(1))
    deltas = [
        "" if frame.startswith("event: ") else json.loads(frame)["choices"][0]["delta"]
        for frame in found
    ]
    assert deltas == [{"reasoning": "Hm.", "reasoning_content": "Hm."}, "", {"content": "42"}]


def test_step_events_are_ascii_lines_without_lone_surrogates() -> None:
    text = "数\n\u2028\ud83d"
    for data in step_objects(
        ToolOutput(1, "stdout", text), FileProduced("cfile_1", f"/x/{text}", 3)
    ):
        json.dumps(data, ensure_ascii=False).encode()
    assert all(frame.isascii() for frame in frames_of(ToolOutput(1, "stdout", text)))
    assert all(frame.count("\n") == 1 for frame in frames_of(ToolOutput(1, "stdout", text)))


def test_output_limit_of_step_events_applies_to_each_command() -> None:
    piece = "x" * (MAX_OUTPUT_CHARS // 2 + 1)
    output = [ToolOutput(1, "stdout", piece)] * 3
    found = step_objects(STARTED, *output, STARTED, output[0])
    lengths = [len(event["text"]) for event in found if event["kind"] == "tool_output"]
    assert lengths == [len(piece), MAX_OUTPUT_CHARS - len(piece), len(piece)]
