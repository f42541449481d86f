"""Every field of chat completions and their streams."""

import json
from dataclasses import replace
from typing import Any

import pytest

from policies.artifacts import SkippedFile
from policies.limits import StopReason
from proxy.agent.events import (
    AnswerDelta,
    Event,
    FileProduced,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.result import Artifact, Compaction, Result
from proxy.errors import BackendError
from proxy.schemas.chat_response import (
    ChatCompletionBuilder,
    CompletionStreamEncoder,
    completion_head,
)
from tests.fakes.results import RUN_STATS, RUN_STATS_JSON

URL = "https://host/v1/containers/cntr_1/files/cfile_1/content?exp=1&sig=2"
PICTURE = Artifact(
    file_id="cfile_1",
    container_id="cntr_1",
    path="/testbed/output/plot.png",
    bytes=880,
    mime_type="image/png",
    sha256="abc",
    url=URL,
    data_url="data:image/png;base64,iVBO",
)
TABLE = replace(
    PICTURE,
    file_id="cfile_2",
    path="/testbed/output/caf\udce9.csv",
    mime_type="text/csv",
    url="https://host/2",
    data_url=None,
)
RESULT = Result(
    run_id="r1",
    container_id="cntr_1",
    model="backend-m",
    answer=f"Done. See [plot.png]({URL}) for it.",
    stop_reason=StopReason.SUBMITTED,
    finish_reason="stop",
    client_calls=[],
    usage={
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 20},
    },
    segments=1,
    stats=RUN_STATS,
    steps=2,
    artifacts=[PICTURE, TABLE],
    skipped_files=[SkippedFile("/testbed/output/huge", 1 << 40, "too_large")],
    choice={},
    response={"model": "backend-m", "system_fingerprint": "fp", "service_tier": None, "id": "x"},
)
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 4,
    "total_tokens": 34,
    "prompt_tokens_details": {"cached_tokens": 20},
    "sandbox": RUN_STATS_JSON,
}
ANNOTATIONS = [
    {
        "type": "url_citation",
        "url_citation": {"url": URL, "title": "plot.png", "start_index": 11, "end_index": 19},
    },
    {
        "type": "url_citation",
        "url_citation": {
            "url": "https://host/2",
            "title": "caf?.csv",
            "start_index": len(RESULT.answer),
            "end_index": len(RESULT.answer),
        },
    },
]
IMAGES = [{"type": "image_url", "index": 0, "image_url": {"url": "data:image/png;base64,iVBO"}}]
SANDBOX = {
    "v": 1,
    "run_id": "r1",
    "container_id": "cntr_1",
    "stop_reason": "submitted",
    "route": "auto",
    "steps": 2,
    "files": [
        {
            "id": "cfile_1",
            "filename": "plot.png",
            "path": "/testbed/output/plot.png",
            "bytes": 880,
            "mime_type": "image/png",
            "sha256": "abc",
            "url": URL,
        },
        {
            "id": "cfile_2",
            "filename": "caf?.csv",
            "path": "/testbed/output/caf?.csv",
            "bytes": 880,
            "mime_type": "text/csv",
            "sha256": "abc",
            "url": "https://host/2",
        },
    ],
    "files_left_out_count": 1,
    "files_left_out": [{"path": "/testbed/output/huge", "bytes": 1 << 40, "why": "too_large"}],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
NOTHING = replace(RESULT, answer="42", artifacts=[], skipped_files=[], response={}, usage={})


def completion_of(result: Result, reasoning: str = "") -> dict[str, Any]:
    builder = ChatCompletionBuilder(completion_head("r1", 7, "qwen3"), "r1", "off")
    builder.add_event(ReasoningDelta(reasoning))
    completion = builder.finish(result)
    json.dumps(completion).encode()
    return completion


def test_completion_of_a_full_result_has_all_fields() -> None:
    assert completion_of(RESULT, "$ ls\n") == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 7,
        "model": "qwen3",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": RESULT.answer,
                    "refusal": None,
                    "annotations": ANNOTATIONS,
                    "reasoning": "$ ls\n",
                    "reasoning_content": "$ ls\n",
                    "images": IMAGES,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "system_fingerprint": "fp",
        "sandbox": SANDBOX,
    }


def test_empty_completion_has_the_required_fields() -> None:
    completion = completion_of(NOTHING)
    assert completion["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "42",
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert {key: completion["usage"][key] for key in completion["usage"] if key != "sandbox"} == {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
    }


def test_completion_with_client_calls_has_null_content() -> None:
    result = replace(NOTHING, answer="", client_calls=[CALL], finish_reason="tool_calls")
    choice = completion_of(result)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["tool_calls"] == [CALL]


def test_completion_contains_the_logprobs_of_the_answer() -> None:
    token = {"token": "42", "logprob": -0.1, "bytes": [52, 50], "top_logprobs": []}
    completion = completion_of(replace(NOTHING, choice={"logprobs": {"content": [token]}}))
    assert completion["choices"][0]["logprobs"] == {"content": [token], "refusal": None}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"See [the plot]({URL}).", "the plot"),
        (f"See ![the plot]({URL}).", "the plot"),
        (f"[a](x) and [b]({URL})", "b"),
        (f"[a] then <{URL}>", URL),
        (f"{URL}", URL),
        ("No link at all.", ""),
        ("", ""),
    ],
)
def test_annotation_covers_the_text_of_a_link_in_the_answer(answer: str, expected: str) -> None:
    result = replace(NOTHING, answer=answer, artifacts=[PICTURE])
    [annotation] = completion_of(result)["choices"][0]["message"]["annotations"]
    at = annotation["url_citation"]
    assert answer[at["start_index"] : at["end_index"]] == expected


# Streamed


def frames(*events: Event, steps: Any = "reasoning") -> list[list[dict[str, Any]]]:
    encoder = stream(steps)
    return [data(encoder.encode(event)) for event in events]


def stream(steps: Any = "reasoning", *, include_usage: bool = False) -> CompletionStreamEncoder:
    return CompletionStreamEncoder(
        completion_head("r1", 7, 'q"3'), "r1", steps, include_usage=include_usage
    )


def data(frames: str) -> list[dict[str, Any]]:
    """Return the JSON objects of server-sent events."""
    lines = [line.removeprefix("data: ") for line in frames.split("\n") if line[:5] == "data:"]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'q"3',
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **more,
    }


def reasoning_chunk(text: str, **more: Any) -> dict[str, Any]:
    return chunk({"reasoning": text, "reasoning_content": text}, **more)


STARTED = ToolCallStarted(1, "c1", "execute_bash", {"command": "ls\npwd"})
FINISHED = ToolCallFinished(
    step=1,
    call_id="c1",
    name="execute_bash",
    observation="Exit code: 0\n[stdout]\na\nb\nc",
    exit_code=0,
    output_lines=3,
    duration_s=1.24,
)


def test_first_chat_chunk_has_the_role_assistant() -> None:
    assert data(stream().begin()) == [chunk({"role": "assistant", "content": ""})]


def test_step_is_streamed_as_reasoning() -> None:
    start = {"v": 1, "run_id": "r1", "step": 1, "kind": "tool_start", "tool": "execute_bash"}
    output = {"v": 1, "step": 1, "kind": "tool_output"}
    end = {"v": 1, "step": 1, "kind": "tool_end", "exit_code": 0, "ms": 1240}
    assert frames(
        ReasoningDelta("Hm."),
        STARTED,
        ToolOutput(1, "stdout", "a"),
        ToolOutput(1, "stdout", "b\nc"),
        FINISHED,
    ) == [
        [reasoning_chunk("Hm.")],
        [reasoning_chunk("\n````console\n$ ls\npwd\n", sandbox=start)],
        [],
        [reasoning_chunk("ab\n", sandbox=output)],
        [reasoning_chunk("c\n[exit 0, 1.2 s, 3 lines]\n````\n", sandbox=end)],
    ]


def test_answer_is_streamed_as_content_with_logprobs() -> None:
    choice = {"index": 0, "delta": {"content": "2"}, "finish_reason": None}
    assert frames(AnswerDelta("4"), AnswerDelta("2", {"content": []})) == [
        [chunk({"content": "4"})],
        [{**chunk({}), "choices": [{**choice, "logprobs": {"content": [], "refusal": None}}]}],
    ]


@pytest.mark.parametrize("steps", ["off", "reasoning", "items"])
def test_events_about_runs_or_turns_or_files_send_no_frame(steps: str) -> None:
    others = [
        RunStarted("r1"),
        TurnStarted(1),
        FileProduced("cfile_1", "/testbed/output/a", 1),
        RunFinished(StopReason.SUBMITTED),
    ]
    assert frames(*others, steps=steps) == [[], [], [], []]


def test_with_steps_off_only_the_models_reasoning_is_streamed() -> None:
    assert frames(ReasoningDelta("Hm."), STARTED, FINISHED, AnswerDelta("42"), steps="off") == [
        [reasoning_chunk("Hm.")],
        [],
        [],
        [chunk({"content": "42"})],
    ]


GONE = BackendError("gone")


@pytest.mark.parametrize("steps", ["off", "reasoning", "items", "events"])
def test_failure_between_steps_streams_only_the_error(steps: str) -> None:
    encoder = stream(steps)
    encoder.encode(ReasoningDelta("Hm."))
    assert data(encoder.fail(GONE)) == [GONE.body()]


def test_failure_of_a_run_closes_the_step_block_that_is_open_in_the_stream() -> None:
    encoder = stream()
    encoder.encode(STARTED)
    assert data(encoder.fail(GONE)) == [reasoning_chunk("[not finished]\n````\n"), GONE.body()]


def test_stream_ends_with_images_then_finish_reason_and_files() -> None:
    assert data(stream().finish(RESULT)) == [
        chunk({"images": IMAGES}),
        chunk({"annotations": ANNOTATIONS}, "stop", sandbox=SANDBOX),
    ]


def test_stream_without_files_ends_with_one_empty_delta() -> None:
    [last] = data(stream().finish(NOTHING))
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]


def test_streamed_client_tool_calls_are_numbered_from_zero() -> None:
    second = {**CALL, "id": "c2", "index": 5}
    result = replace(NOTHING, answer="", client_calls=[CALL, second], finish_reason="tool_calls")
    calls, last = data(stream().finish(result))
    assert calls == chunk({"tool_calls": [{**CALL, "index": 0}, {**second, "index": 1}]})
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_usage_chunk_has_no_choices() -> None:
    *_, last = data(stream(include_usage=True).finish(RESULT))
    assert last == {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'q"3',
        "choices": [],
        "usage": USAGE,
    }


def test_each_streamed_chunk_is_a_single_ascii_line() -> None:
    encoder = stream(include_usage=True)
    texts = [encoder.begin()]
    texts += [encoder.encode(event) for event in (AnswerDelta("数\n\u2028"), STARTED, FINISHED)]
    *frames, end = "".join([*texts, encoder.finish(RESULT)]).split("\n\n")
    assert end == ""
    assert all(frame.isascii() and "\n" not in frame for frame in frames)


def test_sandbox_object_lists_compactions() -> None:
    assert "segments" not in completion_of(RESULT)["sandbox"]
    result = replace(RESULT, segments=2, compactions=[Compaction("stubs", "nearly full", 90, 50)])
    shown = completion_of(result)["sandbox"]
    compaction = {"kind": "stubs", "cause": "nearly full", "tokens_before": 90, "tokens_after": 50}
    assert (shown["segments"], shown["compactions"]) == (2, [compaction])
