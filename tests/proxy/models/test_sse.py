"""Server-sent events."""

import pytest

from proxy.models.sse import SSEDecoder


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
