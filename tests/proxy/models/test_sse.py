"""Server-sent events."""

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


def test_comments_other_fields_and_line_ends_of_both_kinds_are_understood() -> None:
    assert decoded(STREAM) == EVENTS


@pytest.mark.parametrize("place", range(1, len(STREAM)))
def test_bytes_may_be_split_at_any_place(place: int) -> None:
    assert decoded(STREAM[:place], STREAM[place:]) == EVENTS


def test_bytes_may_come_one_by_one() -> None:
    assert decoded(*(bytes([byte]) for byte in STREAM)) == EVENTS


def test_the_last_event_needs_no_empty_line() -> None:
    assert decoded(b"data: one\n\ndata: [DONE]\n") == [b"one", b"[DONE]"]


def test_a_line_that_was_cut_means_nothing() -> None:
    assert decoded(b'data: one\n\ndata: {"choi') == [b"one"]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(st.tuples(LINES, TEXTS, ENDS), max_size=12))
    return b"".join(part for line in parts for part in line)


def read_whole(stream: bytes) -> list[bytes]:
    """The events of a stream, read line by line as the specification says."""
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
def test_any_stream_has_the_same_events_however_it_is_split(
    stream: bytes, places: list[int]
) -> None:
    bounds = sorted({0, len(stream), *(min(place, len(stream)) for place in places)})
    pieces = [stream[start:end] for start, end in pairwise(bounds)]
    assert decoded(*pieces) == read_whole(stream)


def test_an_event_has_a_bound_and_a_stream_has_none() -> None:
    """Each piece here ends an event and has all of the next but its end."""
    decoder = SSEDecoder()
    value = b"x" * (MAX_EVENT_BYTES // 8)
    for _ in range(20):
        assert decoder.feed(b"\ndata: " + value + b"\n") in ([], [value])
    with pytest.raises(EventTooLongError):
        decoded(*[b"data: " + value + b"\n"] * 8)
