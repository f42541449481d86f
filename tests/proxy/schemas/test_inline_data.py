"""Decoding of files in strings of a request."""

import base64
import random
import tracemalloc
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.schemas.content_parts import InlineData, parse_data_url

MAX_PIECE_BYTES = 1 << 18


def bare(text: str) -> InlineData:
    return InlineData(text, 0, "")


def size(data: InlineData) -> int:
    """Return the measured size."""
    steps = data.measure()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


def content(data: InlineData) -> bytes:
    return b"".join(data.pieces())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 196_607, 196_608, 196_609, 1_000_001])
def test_inline_data_of_any_size_is_decoded(count: int) -> None:
    written = random.Random(count).randbytes(count)
    text = base64.b64encode(written).decode()
    for spelling in (text, text.rstrip("="), base64.encodebytes(written).decode()):
        assert size(bare(spelling)) == count
        assert content(bare(spelling)) == written


@pytest.mark.parametrize(
    "text", ["?", "YWJj=", "YQ===", "Y=Q=", "YQ==YQ==", "Y", "YWJjZ", "a-_b", "é", "\x00AAA"]
)
def test_invalid_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it "):
        size(bare(text))


def test_base64_padding_before_the_end_is_refused_even_between_pieces() -> None:
    padded = "A" * ((1 << 18) - 1) + "="
    assert size(bare(padded)) == (1 << 18) // 4 * 3 - 1
    with pytest.raises(ValueError, match="it "):
        size(bare(padded + "AAAA"))


@pytest.mark.parametrize(
    ("url", "mime_type", "written"),
    [
        ("data:text/csv;base64,YSxi", "text/csv", b"a,b"),
        ("DATA:text/csv;charset=utf-8;BASE64,YSxi", "text/csv", b"a,b"),
        ("data:text/csv,a%2Cb", "text/csv", b"a,b"),
        ("data:,a,b", "text/plain", b"a,b"),
        ("data:;base64,YSxi", "text/plain", b"a,b"),
    ],
)
def test_data_url_is_decoded(url: str, mime_type: str, written: bytes) -> None:
    data = parse_data_url(url)
    assert (data.mime_type, size(data), content(data)) == (mime_type, len(written), written)


def test_data_url_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="no comma"):
        parse_data_url("data:text/csv;base64")


@given(st.text(st.sampled_from("%%%=A41fF\n\r\t _zé\0")) | st.text())
def test_percent_encoded_data_is_decoded_as_by_the_standard_library(text: str) -> None:
    data = InlineData(text, 0, "", is_base64=False)
    try:
        expected = unquote_to_bytes(text)
    except UnicodeEncodeError:
        with pytest.raises(ValueError, match="surrogates"):
            size(data)
    else:
        assert content(data) == expected


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_long_percent_encoded_data_is_decoded_in_pieces(offset: int) -> None:
    """Decoding the data at once took a hundred bytes of memory for each encoded byte."""
    data = parse_data_url("data:text/plain," + "x" * offset + "%41" * 300_000)
    assert size(data) == offset + 300_000
    assert content(data) == b"x" * offset + b"A" * 300_000
    assert max(map(len, data.pieces())) < 300_000


@pytest.mark.parametrize(
    "encode", [base64.b64encode, base64.encodebytes], ids=["in one line", "in lines"]
)
def test_long_base64_is_measured_and_decoded_in_pieces(encode: Callable[[bytes], bytes]) -> None:
    """At no time does memory hold more of the file than the copies of one piece."""
    written = bytes(16 << 20)
    data = bare(encode(written).decode())
    sizes: list[int] = []
    tracemalloc.start()
    try:
        assert size(data) == len(written)
        sizes.extend(map(len, data.pieces()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sizes) == len(written)
    assert max(sizes) <= MAX_PIECE_BYTES
    assert peak < 8 * MAX_PIECE_BYTES
