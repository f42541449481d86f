"""Decoding and encoding of large JSON, with the same results as the `json` module."""

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.json_bounds import decode_json, encode_json, has_non_finite

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(TREES, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
def test_json_is_decoded_to_the_same_value_as_by_the_json_module(
    tree: object, is_ascii: bool, encoding: str
) -> None:
    text = json.dumps(tree, ensure_ascii=is_ascii)
    assert decode_json(text.encode(encoding)) == tree


@pytest.mark.parametrize(
    "text",
    [b'"\\ud800"', '"\ud800"', b"NaN", b"-Infinity", b"1e400", b'{"a":1,"a":2}', b"\xef\xbb\xbf1"],
)
def test_unusual_json_is_decoded_as_by_the_json_module(text: str | bytes) -> None:
    assert repr(decode_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", [b'{"a":', b'"\xff"', b"[1,]", b"\x00", b"9" * 5000])
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever `json` says
        decode_json(text)


@given(TREES)
def test_value_encoded_as_json_decodes_to_the_same_value(tree: object) -> None:
    assert json.loads(encode_json(tree)) == tree


@pytest.mark.parametrize("value", ["\ud800", {"a": 1 << 70}, [-(1 << 70)], {1: 2}])
def test_values_that_orjson_refuses_are_encoded_by_the_json_module(value: object) -> None:
    assert encode_json(value) == json.dumps(value).encode()


@pytest.mark.parametrize("beside", [1.5, 1 << 70, "\ud800"])
def test_non_finite_numbers_are_encoded_as_null(beside: object) -> None:
    tree = {"a": [nan, {"b": -inf}], "c": inf, "beside": beside}
    expected = {"a": [None, {"b": None}], "c": None, "beside": beside}
    assert json.loads(encode_json(tree)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(inf, True), ([1, {"a": [-inf]}], True), ({"a": nan}, True), ({"a": [1.5, "inf"]}, False)],
)
def test_has_non_finite_finds_nested_non_finite_numbers(value: object, expected: bool) -> None:
    assert has_non_finite(value) is expected
