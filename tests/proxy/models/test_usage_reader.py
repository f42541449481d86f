"""The usage in relayed responses."""

import json
from typing import Any

import pytest

from policies.prices import TokenUsage, parse_usage
from proxy.models.streaming import MAX_USAGE_BYTES, UsageReader

JSON, EVENTS = "application/json; charset=utf-8", "text/event-stream"


def read(content_type: str, *pieces: bytes) -> UsageReader:
    reader = UsageReader(content_type)
    for piece in pieces:
        reader.feed(piece)
    reader.end()
    return reader


def events(*values: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


def test_usage_of_a_json_response_is_read() -> None:
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode()
    assert parse_usage(read(JSON, body[:10], body[10:]).usage) == TokenUsage(prompt=7)


@pytest.mark.parametrize(
    "stream",
    [
        events(
            {"choices": [{}]}, {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, "[DONE]"
        ),
        events(
            {
                "type": "response.completed",
                "response": {"usage": {"input_tokens": 7, "output_tokens": 3}},
            }
        ),
        events(
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 7, "output_tokens": 1}},
            },
            {"type": "message_delta", "usage": {"output_tokens": 3}},
        ),
        events({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, {"usage": None}),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_usage_of_a_stream_of_each_api_is_read(stream: bytes, size: int) -> None:
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert parse_usage(read(EVENTS, *pieces).usage) == TokenUsage(prompt=7, completion=3)


def test_usage_of_a_stream_that_reports_none_is_estimated_by_its_events() -> None:
    reader = read(EVENTS, events({"choices": [{}]}, {"choices": [{}]}, "[DONE]"))
    assert (reader.usage, reader.estimated_tokens) == ({}, 3)


LONG = "x" * (MAX_USAGE_BYTES + 1)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


@pytest.mark.parametrize("size", [100_000, 1 << 30])
@pytest.mark.parametrize("after", [{}, {"user": 'a "usage": {', "metadata": {"a": [{}]}}])
def test_usage_at_the_end_of_a_long_response_is_read(after: Any, size: int) -> None:
    body = json.dumps({"choices": [LONG], "usage": USAGE, **after}, indent=1).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert parse_usage(read(JSON, *pieces).usage) == TokenUsage(prompt=7, completion=3)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [LONG]},
        {"usage": USAGE, "choices": [LONG]},
        {"choices": [LONG], "tools": [{"usage": {"prompt_tokens": 1}}]},
        {"choices": [LONG], "tools": {"usage": {"prompt_tokens": 1}, "more": {}}},
    ],
)
def test_usage_that_is_not_at_the_end_of_a_long_response_is_estimated_by_its_length(
    answer: Any,
) -> None:
    body = json.dumps(answer).encode()
    reader = read(JSON, body)
    assert (reader.usage, reader.estimated_tokens) == ({}, len(body) // 4)


def test_usage_of_a_truncated_response_is_estimated_by_its_length() -> None:
    body = json.dumps({"choices": ["x" * 4000], "usage": USAGE}).encode()[:-1]
    reader = read(JSON, body)
    assert (reader.usage, reader.estimated_tokens) == ({}, len(body) // 4)


def test_usage_of_a_response_that_reports_none_is_estimated_by_its_text() -> None:
    completion = {"choices": [{"message": {"content": "x" * 4000}}], "model": "y" * 4000}
    assert read(JSON, json.dumps(completion).encode()).estimated_tokens == 1001
    vectors = {"data": [{"embedding": [0.1] * 4000}]}
    assert read(JSON, json.dumps(vectors).encode()).estimated_tokens == 1


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain", b'{"usage": {"prompt_tokens": 7}}'),
        (JSON, b'{"usage": {"prompt_tok'),
        (JSON, b'["usage"]'),
        (JSON, b'{"usage": 7}'),
        (JSON, b"[" * 100_000),
        (EVENTS, b'data: {"usage": \n\n'),
        (JSON, b'{"usage": {"prompt_tokens": 7}}' + b" " * (MAX_USAGE_BYTES + 1)),
    ],
)
def test_usage_of_an_unreadable_response_is_empty(content_type: str, body: bytes) -> None:
    assert read(content_type, body).usage == {}
