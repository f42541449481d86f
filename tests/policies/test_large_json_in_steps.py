"""Decoding and encoding of large JSON in steps, with the same results as in one step."""

import json
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.json_bounds import (
    MAX_STRUCTURE_BYTES,
    TooMuchJSONError,
    encode_json,
    encode_sorted_json,
)
from policies.large_json import (
    CHARS_PER_VALUE,
    MIN_CHARS,
    PIECE_SIZE,
    count_chars,
    decode_in_steps,
    encode_in_steps,
)

T = TypeVar("T")
MARK = "c0ffee-"
MIB = 1 << 20
LONG_TEXTS = st.builds(
    lambda piece, times: piece * times,
    st.text('x"\\/\n\u00e9\u20ac\U0001f600\ud83d\ude00', min_size=1, max_size=5),
    st.integers(0, 60),
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | LONG_TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LONG_TEXTS, inner, max_size=3),
    max_leaves=12,
)


def finish(steps: Generator[None, None, T]) -> tuple[T, int]:
    """Return the result, and the number of steps."""
    count = 0
    while True:
        count += 1
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value, count


@given(TREES, st.booleans(), st.integers(13, 100))
def test_json_decoded_in_steps_has_the_value_of_json_decoded_at_once(
    tree: object, is_ascii: bool, piece_size: int
) -> None:
    text = json.dumps(tree, ensure_ascii=is_ascii, indent=1).encode(errors="surrogatepass")
    decoded, _ = finish(decode_in_steps(text, MARK, piece_size))
    assert decoded.value == _decode(text)


@given(st.text(st.sampled_from('"\\u0dD8e9f[]{},:x'), max_size=300), st.integers(13, 40))
def test_malformed_json_is_refused_or_decoded_as_in_one_step(text: str, piece_size: int) -> None:
    written = text.encode()
    try:
        expected = json.loads(written)
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - whatever `json` says
            finish(decode_in_steps(written, MARK, piece_size))
    else:
        decoded, _ = finish(decode_in_steps(written, MARK, piece_size))
        assert decoded.value == expected


@pytest.mark.parametrize(
    "written",
    [
        b'["' + b"x" * 200,
        b'["' + b"\\" * 201 + b'"]',
        b'"' + b"x" * 100 + b"\x00" + b'"',
        b'"' + b"\x00x" * 100 + b'"',
        b'"' + b"x" * 100 + b"\xff" + b'"',
        b'"' + b"\\u00e" * 30 + b'"',
        b'["' + b"x" * 100 + b'" "' + b"x" * 100 + b'"]',
    ],
)
def test_invalid_long_json_strings_are_refused(written: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever `json` says
        finish(decode_in_steps(written, MARK, 32))


@given(TREES, st.integers(1, 100))
def test_json_encoding_in_steps_has_the_same_value_and_does_not_change_the_original(
    tree: object, piece_size: int
) -> None:
    before = repr(tree)
    encoded, _ = finish(encode_in_steps(tree, MARK, piece_size=piece_size))
    assert json.loads(encoded) == json.loads(encode_json(tree))
    assert repr(tree) == before


def test_sorted_json_encoding_in_steps_equals_the_encoding_in_one_step() -> None:
    tree = {"b": ["\u00e9" * 500, {"d": "x" * 900, "c": "\\" * 70}], "a": "y" * 70}
    encoded, _ = finish(encode_in_steps(tree, MARK, encode_sorted_json, 100))
    assert encoded == encode_sorted_json(tree)


@pytest.mark.parametrize("unit", [b"x", b"\\u00e9", "\u20ac".encode(), b"\\ud83d\\ude00"])
def test_long_json_string_is_decoded_and_encoded_in_many_steps(unit: bytes) -> None:
    """No step handles more than a piece. As one step, a string of 16 MiB stalled the server."""
    written = b'{"text": "' + unit * (16 * MIB // len(unit)) + b'"}'
    decoded, steps = finish(decode_in_steps(written, MARK))
    assert decoded.value == json.loads(written)
    assert steps > 2 * len(written) // PIECE_SIZE  # to find its end, and to decode it
    _, steps = finish(encode_in_steps(decoded.value, MARK))
    assert steps > len(decoded.value["text"]) // (2 * PIECE_SIZE)


def test_memory_of_a_decoded_json_value_and_its_encoding_is_counted() -> None:
    written = b'{"text": "' + b"x" * MIB + b'"}'
    decoded, _ = finish(decode_in_steps(written, MARK))
    assert 2 * MIB < decoded.memory_bytes < 2 * MIB + 1000


def test_length_of_names_in_json_objects_is_limited() -> None:
    fits = b'{"' + b"k" * MIN_CHARS + b'" : 1}'
    decoded, _ = finish(decode_in_steps(fits, MARK))
    assert decoded.value == {"k" * MIN_CHARS: 1}
    with pytest.raises(TooMuchJSONError, match="8 MiB of names"):
        finish(decode_in_steps(b'{"' + b"k" * MAX_STRUCTURE_BYTES + b'":1}', MARK))


def test_count_chars_counts_string_characters_and_a_constant_for_each_list_item() -> None:
    assert count_chars({"name": {"x": "de"}, "y": "f", "z": 1}) == 3
    assert count_chars(["abc", 1, None]) == 3 + 3 * CHARS_PER_VALUE


def _decode(text: bytes) -> object:
    return json.loads(text.decode(errors="surrogatepass"))


def test_non_finite_number_beside_a_long_string_is_encoded_as_null() -> None:
    value = {"text": "x" * 100, "number": float("nan"), "integers": [1 << 64, -(1 << 70), True]}
    encoded, _ = finish(encode_in_steps(value, MARK))
    assert json.loads(encoded) == {**value, "number": None}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_non_finite_number_in_decoded_json_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="not valid in JSON"):
        finish(decode_in_steps(f"[[{number}]]".encode(), MARK))


def test_large_json_in_another_encoding_than_utf_8_is_refused() -> None:
    """Its bytes can look like long strings of UTF-8, and would then hide what is between them."""
    quotes = "\u2261" + "\u6161" * MIN_CHARS + "\u2261"
    for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-32"):
        text = f'{{"model": "m", "a": "{quotes}"}}'.encode(encoding)
        with pytest.raises(ValueError, match="must be in UTF-8"):
            finish(decode_in_steps(text, MARK))


def test_byte_order_mark_before_large_json_is_skipped() -> None:
    text = json.dumps({"text": "x" * MIN_CHARS}).encode("utf-8-sig")
    assert finish(decode_in_steps(text, MARK))[0].value == {"text": "x" * MIN_CHARS}


def test_counting_of_characters_stops_once_the_given_number_is_exceeded() -> None:
    assert count_chars(["x" * 100, "y" * 100], 150) <= 200 + 2 * CHARS_PER_VALUE
    assert 150 < count_chars(["x" * 100, "y" * 100] * 1000, 150) < 100 * 1000 + 1
