"""Steps as events of their own; README has one of each, and they are held to that."""

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
    frames = "".join(map(encoder.event, events)).split("\n\n")
    return [frame.removeprefix("data: ") for frame in frames if frame]


def told(*events: Event) -> list[dict[str, Any]]:
    """The events of ours."""
    found = [frame.partition("\ndata: ") for frame in frames_of(*events)]
    chunks = [json.loads(data) for name, _, data in found if name == "event: sandbox.step"]
    assert all(chunk["choices"][0]["delta"] == {} for chunk in chunks)
    return [chunk["sandbox"] for chunk in chunks]


def test_an_event_stands_beside_a_chunk_that_says_nothing() -> None:
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


def test_thinking_and_the_answer_come_as_chunks_beside_them() -> None:
    found = frames_of(ReasoningDelta("Hm."), STARTED, AnswerDelta("42"), TurnStarted(1))
    deltas = [
        "" if frame.startswith("event: ") else json.loads(frame)["choices"][0]["delta"]
        for frame in found
    ]
    assert deltas == [{"reasoning": "Hm.", "reasoning_content": "Hm."}, "", {"content": "42"}]


def test_an_event_is_one_line_of_ascii_without_halves_of_surrogate_pairs() -> None:
    text = "数\n\u2028\ud83d"
    for data in told(ToolOutput(1, "stdout", text), FileProduced("cfile_1", f"/x/{text}", 3)):
        json.dumps(data, ensure_ascii=False).encode()
    assert all(frame.isascii() for frame in frames_of(ToolOutput(1, "stdout", text)))
    assert all(frame.count("\n") == 1 for frame in frames_of(ToolOutput(1, "stdout", text)))


def test_the_output_of_one_command_is_capped_and_the_next_has_its_own_cap() -> None:
    piece = "x" * (MAX_OUTPUT_CHARS // 2 + 1)
    output = [ToolOutput(1, "stdout", piece)] * 3
    found = told(STARTED, *output, STARTED, output[0])
    lengths = [len(event["text"]) for event in found if event["kind"] == "tool_output"]
    assert lengths == [len(piece), MAX_OUTPUT_CHARS - len(piece), len(piece)]
