"""Decoding of server-sent events."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.models.streaming import MAX_EVENT_BYTES, EventTooLongError, SSEDecoder

LINES = st.sampled_from([b"data", b"data:", b"data: ", b"data:  ", b"dat", b": ", b"event: ", b""])
ENDS = st.sampled_from([b"\n", b"\r\n"])
TEXTS = st.text(alphabet="ab: \ré", max_size=4).map(str.encode)


def decoded(*pieces: bytes) -> list[bytes]:
    decoder = SSEDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)] + decoder.flush()


STREAM = (
    b": welcome\n\n"
    b"data: one\n\n"
    b"event: named\r\ndata:two\r\n\r\n"
    b"id: 7\ndata: three\ndata:  and a half\n\n"
    b"retry: 10\n\ndata\n\n"
    b"data: na\xc3\xafve\n\n"
)
EVENTS = [b"one", b"two", b"three\n and a half", b"", b"na\xc3\xafve"]


def test_stream_with_comments_unknown_fields_and_both_line_ends_is_decoded() -> None:
    assert decoded(STREAM) == EVENTS


@pytest.mark.parametrize("place", range(1, len(STREAM)))
def test_stream_can_be_split_at_any_byte(place: int) -> None:
    assert decoded(STREAM[:place], STREAM[place:]) == EVENTS


def test_stream_that_arrives_byte_by_byte_is_decoded() -> None:
    assert decoded(*(bytes([byte]) for byte in STREAM)) == EVENTS


def test_last_event_of_a_stream_needs_no_empty_line() -> None:
    assert decoded(b"data: one\n\ndata: [DONE]\n") == [b"one", b"[DONE]"]


def test_unfinished_line_at_the_end_of_a_stream_is_ignored() -> None:
    assert decoded(b'data: one\n\ndata: {"choi') == [b"one"]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(st.tuples(LINES, TEXTS, ENDS), max_size=12))
    return b"".join(part for line in parts for part in line)


def decode_by_lines(stream: bytes) -> list[bytes]:
    """Return the events of a stream, parsed line by line as in the specification."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in [*(line.removesuffix(b"\r") for line in stream.split(b"\n")[:-1]), b""]:
        if line == b"data" or line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        if not line and data:
            events.append(b"\n".join(data))
            data = []
    return events


@settings(deadline=None)
@given(streams(), st.lists(st.integers(0, 200), max_size=6))
def test_split_stream_has_the_events_of_the_unsplit_stream(
    stream: bytes, places: list[int]
) -> None:
    bounds = sorted({0, len(stream), *(min(place, len(stream)) for place in places)})
    pieces = [stream[start:end] for start, end in pairwise(bounds)]
    assert decoded(*pieces) == decode_by_lines(stream)


def test_size_of_an_event_is_limited_and_size_of_a_stream_is_not() -> None:
    """Each piece ends an event and contains the next event except its end."""
    decoder = SSEDecoder()
    value = b"x" * (MAX_EVENT_BYTES // 8)
    for _ in range(20):
        assert decoder.feed(b"\ndata: " + value + b"\n") in ([], [value])
    with pytest.raises(EventTooLongError):
        decoded(*[b"data: " + value + b"\n"] * 8)
