"""Steps as Open WebUI's cards: the frames, and their effect in Open WebUI."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from proxy.agent.events import (
    AnswerDelta,
    Event,
    ReasoningDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Artifact
from proxy.errors import BackendError
from proxy.schemas.chat_response import CompletionStreamEncoder, completion_head
from tests.fakes.open_webui import OpenWebUI
from tests.fakes.results import SUBMITTED
from tests.proxy.schemas.test_chat_response import data

PICTURE = Artifact(
    file_id="cfile_1",
    container_id="cntr_r1",
    path="/testbed/output/dot.gif",
    bytes=7,
    mime_type="image/gif",
    sha256="abc",
    url="https://host/1",
    data_url="data:image/gif;base64,R0lG",
)
TABLE = replace(
    PICTURE, path="/testbed/output/t.csv", mime_type="text/csv", url="https://host/2", data_url=None
)
HUGE = replace(PICTURE, path="/testbed/output/huge.png", url="https://host/3", data_url=None)
HUGE = replace(HUGE, mime_type="image/png")
RESULT = replace(SUBMITTED, container_id="cntr_r1")


def started(step: int, name: str = "execute_bash", **arguments: Any) -> ToolCallStarted:
    return ToolCallStarted(step, "the-models-own", name, arguments or {"command": "ls -la"})


def finished(step: int, observation: str = "Exit code: 0") -> ToolCallFinished:
    return ToolCallFinished(
        step=step,
        call_id="the-models-own",
        name="execute_bash",
        observation=observation,
        exit_code=0,
        output_lines=0,
        duration_s=0.1,
    )


class Stream:
    """The frames of a run, and a model of Open WebUI that has read the frames."""

    def __init__(self, *events: Event) -> None:
        self.encoder = CompletionStreamEncoder(
            completion_head("r1", 7, "m"), "r1", "items", include_usage=False
        )
        self.reader = OpenWebUI()
        self.frames: list[dict[str, Any]] = []
        for event in events:
            self.add(self.encoder.encode(event))

    def add(self, frames: str) -> "Stream":
        for frame in data(frames):
            self.frames.append(frame)
            self.reader.take(frame)
        return self

    @property
    def extra_fields(self) -> list[dict[str, Any]]:
        """Return the fields of the frames that are not fields of a chunk."""
        names = ("id", "object", "created", "model", "choices", "sandbox")
        found = [{k: frame[k] for k in frame if k not in names} for frame in self.frames]
        return [keys for keys in found if keys]


def status(description: str, *, done: bool = False) -> dict[str, Any]:
    data = {"action": "sandbox", "description": description, "done": done}
    return {"event": {"type": "status", "data": data}}


def test_finished_step_is_streamed_as_a_call_item_and_an_output_item() -> None:
    stream = Stream(ReasoningDelta("Hm."), started(1), finished(1, "Exit code: 0\n[stdout]\na"))
    item = {
        "type": "function_call",
        "id": "fc_r1_1",
        "call_id": "step_r1_1",
        "name": "execute_bash",
        "arguments": '{"command": "ls -la"}',
        "status": "completed",
    }
    output = {
        "type": "function_call_output",
        "id": "fco_r1_1",
        "call_id": "step_r1_1",
        "output": [{"type": "input_text", "text": "Exit code: 0\n[stdout]\na"}],
        "status": "completed",
    }
    begun = {**item, "arguments": "", "status": "in_progress"}
    assert stream.extra_fields == [
        status("Running: ls -la"),
        {"type": "response.output_item.added", "output_index": 1, "item": begun},
        {"type": "response.output_item.done", "output_index": 1, "item": item},
        {"type": "response.output_item.added", "output_index": 2, "item": output},
        status("Ran: ls -la"),
    ]
    assert all(
        frame["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
        for frame in stream.frames[1:]
    )


def test_call_items_and_reasoning_items_keep_their_order() -> None:
    stream = Stream(
        ReasoningDelta("First"),
        ReasoningDelta(" this."),
        started(1),
        finished(1, "a"),
        started(2),
        finished(2, "b"),
        ReasoningDelta("Then that."),
        started(3),
        finished(3, "c"),
        AnswerDelta("Do"),
        AnswerDelta("ne."),
    )
    card = 'execute_bash {"command": "ls -la"} completed'
    assert stream.reader.shown == [
        "reasoning: First this.",
        card,
        "-> a",
        card,
        "-> b",
        "reasoning: Then that.",
        card,
        "-> c",
        "message: Done.",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_each_call_item_is_followed_by_its_output_item(seed: int) -> None:
    rng = random.Random(seed)
    events: list[Event] = []
    for step in range(1, rng.randint(2, 12)):
        events += rng.choices([ReasoningDelta("Hm."), ReasoningDelta("\n")], k=rng.randint(0, 3))
        events += [AnswerDelta("Or so.")] * (rng.random() < 0.1)
        tool = rng.choice(["execute_bash", "submit", "unknown"])
        output = [ToolOutput(step, "stdout", "x\n")] * rng.randint(0, 3)
        events += [started(step, tool), *output, finished(step, f"{step}")]
    items = Stream(*events, AnswerDelta("Done.")).reader.items
    cards = [n for n, item in enumerate(items) if item["type"] == "function_call"]
    results = [n for n, item in enumerate(items) if item["type"] == "function_call_output"]
    assert results == [n + 1 for n in cards]
    assert [items[n]["call_id"] for n in cards] == [items[n]["call_id"] for n in results]


def test_call_item_is_placed_between_the_narration_before_it_and_the_answer() -> None:
    stream = Stream(
        AnswerDelta("I think so."),
        ReasoningDelta("not shown"),
        started(1),
        finished(1, "no"),
        AnswerDelta("It is not."),
    )
    assert stream.reader.shown == [
        "message: I think so.",
        'execute_bash {"command": "ls -la"} completed',
        "-> no",
        "message: It is not.",
    ]


def test_submit_has_no_call_item() -> None:
    submit = replace(finished(1), name="submit")
    stream = Stream(started(1, "submit", answer="42"), submit, AnswerDelta("42"))
    stream.add(stream.encoder.finish(RESULT))
    assert stream.reader.shown == ["message: 42"]
    assert stream.extra_fields == []


def test_status_line_shows_the_last_line_of_output() -> None:
    pieces = [ToolOutput(1, "stdout", f"{n}\n\x1b[1mline {n}\x1b[0m\n") for n in range(1, 101)]
    stream = Stream(started(1, command="make\nall"), *pieces, finished(1))
    assert stream.reader.statuses == [
        ("Running: make ...", False),
        *((f"Running: make ... - line {n}", False) for n in (1, 2, 4, 8, 16, 32, 64)),
        ("Ran: make ...", False),
    ]


def test_blank_or_late_output_does_not_change_the_status_line() -> None:
    blank, late = ToolOutput(1, "stdout", " \n\n"), ToolOutput(1, "stdout", "late\n")
    stream = Stream(started(1), blank, finished(1), late)
    assert stream.reader.statuses == [("Running: ls -la", False), ("Ran: ls -la", False)]


def test_end_of_a_run_lists_its_files_and_closes_the_status_line() -> None:
    stream = Stream(started(1), finished(1), started(2), finished(2))
    stream.add(stream.encoder.finish(replace(RESULT, artifacts=[PICTURE, TABLE, HUGE])))
    assert stream.reader.statuses[-1] == ("2 steps, 3 files", True)
    # The small image is part of the message.
    assert stream.reader.files == [
        {"type": "file", "url": "https://host/2", "name": "t.csv", "size": 7},
        {"type": "image", "url": "https://host/3", "name": "huge.png"},
    ]
    assert stream.frames[-1]["choices"][0]["finish_reason"] == "stop"
    assert [frame["choices"][0]["finish_reason"] for frame in stream.frames[:-1]] == [None] * 13
    # Open WebUI would ask Google for the icon of each link.
    assert "annotations" not in stream.frames[-1]["choices"][0]["delta"]


def test_status_line_counts_a_single_step_and_file_in_the_singular() -> None:
    stream = Stream(started(1), finished(1))
    stream.add(stream.encoder.finish(replace(RESULT, artifacts=[PICTURE])))
    assert (stream.reader.statuses[-1], stream.reader.files) == (("1 step, 1 file", True), [])


def test_stream_without_steps_has_no_status_line() -> None:
    stream = Stream(AnswerDelta("Hello."))
    stream.add(stream.encoder.finish(RESULT))
    assert stream.extra_fields == []


def test_failed_run_leaves_no_call_item_in_progress() -> None:
    """Open WebUI would run a call without a result itself and repeat the request."""
    stream = Stream(ReasoningDelta("Hm."), started(1))
    assert stream.reader.to_run == ["execute_bash"]
    stream.add(stream.encoder.fail(BackendError("gone")))
    assert stream.reader.to_run == []
    assert stream.reader.shown[1:] == [
        'execute_bash {"command": "ls -la"} completed',
        "-> It was not finished.",
    ]
    assert stream.reader.statuses[-1] == ("Stopped after 1 step", True)
    assert stream.reader.error == BackendError("gone").body()["error"]


def test_long_tool_output_is_cut_in_the_middle() -> None:
    stream = Stream(started(1), finished(1, "a" * 30_000 + "z" * 30_000))
    text = stream.reader.items[-1]["output"][0]["text"]
    assert len(text) < 10_100
    assert (text[0], text[-1]) == ("a", "z")


@pytest.mark.parametrize("text", ["\ud83d", "\u2028", "数", "\n", '"'])
def test_frames_are_ascii_lines_without_lone_surrogates(text: str) -> None:
    encoder = Stream().encoder
    texts = [
        encoder.encode(started(1, command=text, path=text)),
        encoder.encode(ToolOutput(1, "stdout", text)),
        encoder.encode(finished(1, text)),
        encoder.finish(replace(RESULT, artifacts=[replace(TABLE, path=f"/x/{text}.csv")])),
    ]
    *frames, _ = "".join(texts).split("\n\n")
    assert all(frame.isascii() and "\n" not in frame for frame in frames)
    for frame in data("".join(texts)):
        json.dumps(frame, ensure_ascii=False).encode()
        arguments = frame.get("item", {}).get("arguments")
        json.dumps(json.loads(arguments or "{}"), ensure_ascii=False).encode()
