"""Limits on the values and the nesting of JSON, for any encoding and any piece size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.json_bounds import (
    MAX_DEPTH,
    MAX_STRUCTURE_BYTES,
    MAX_VALUES,
    JSONBoundsCheck,
    TooMuchJSONError,
    encode_sorted_json,
)

STRINGS = st.text(alphabet='{}[],:"\\a\u2222é\n', max_size=8)
TREES = st.recursive(
    st.none() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


def check_in_pieces(text: bytes, size: int) -> JSONBoundsCheck:
    bounds = JSONBoundsCheck()
    for start in range(0, len(text), size):
        bounds.check(text[start : start + size])
    return bounds


def values(tree: object) -> int:
    """Return the number of commas and opening brackets."""
    if not isinstance(tree, dict | list):
        return 0
    inner = list(tree.values()) if isinstance(tree, dict) else tree
    return 1 + max(0, len(inner) - 1) + sum(map(values, inner))


def depth(tree: object) -> int:
    if not isinstance(tree, dict | list):
        return 0
    inner = tree.values() if isinstance(tree, dict) else tree
    return 1 + max(map(depth, inner), default=0)


@given(TREES, st.integers(1, 9), st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_json_values_are_counted_correctly_however_the_text_is_split(
    tree: object, size: int, is_ascii: bool, encoding: str
) -> None:
    text = "    " + json.dumps(tree, ensure_ascii=is_ascii)
    bounds = check_in_pieces(text.encode(encoding), size)
    assert bounds.values == values(tree)


@given(TREES, st.integers(1, 9))
def test_json_nesting_above_the_limit_is_refused_for_any_piece_size(
    tree: object, size: int
) -> None:
    wrapper_depth = MAX_DEPTH - depth(tree)
    text = json.dumps(tree).encode()
    check_in_pieces(b"[" * wrapper_depth + text + b"]" * wrapper_depth + b"    ", size)
    if depth(tree):
        with pytest.raises(TooMuchJSONError, match="64 levels"):
            check_in_pieces(
                b"[" * (wrapper_depth + 1) + text + b"]" * (wrapper_depth + 1) + b"    ", size
            )


@pytest.mark.parametrize("size", [7, 1 << 16])
@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"{}," * MAX_VALUES,
        b"[" + b"1," * (MAX_VALUES + 1),
        b'{"a": [' + b'"s",' * (MAX_VALUES + 1),
        ("[" + "{}," * MAX_VALUES).encode("utf-16"),
        b"[" + b" " * (MAX_STRUCTURE_BYTES + 1) + b"]",
        b"[" + b"9" * (MAX_STRUCTURE_BYTES + 1) + b"]",
    ],
    ids=["objects", "numbers", "strings", "in UTF-16", "blanks", "digits"],
)
def test_too_large_json_is_refused_before_its_end(text: bytes, size: int) -> None:
    with pytest.raises(TooMuchJSONError):
        check_in_pieces(text, size)


def test_length_of_json_strings_is_not_limited() -> None:
    text = json.dumps({"file": "QUJD" * (MAX_STRUCTURE_BYTES // 2), "text": "{,[" * MAX_VALUES})
    assert check_in_pieces(text.encode(), 1 << 16).values == 2


def test_second_byte_of_a_utf_16_character_is_no_quotation_mark() -> None:
    """Each byte of U+2222 in UTF-16 equals a quotation mark in ASCII."""
    text = '["\u2222",' + "{}," * MAX_VALUES
    with pytest.raises(TooMuchJSONError):
        check_in_pieces(text.encode("utf-16-le"), 1000)


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@settings(deadline=None)
@given(TREES, st.lists(st.sampled_from("\ud800\udc00"), max_size=4), st.sampled_from(WIDE))
def test_json_values_are_counted_despite_lone_surrogates(
    tree: object, surrogates: list[str], encoding: str
) -> None:
    text = f'["{"".join(surrogates)}", {json.dumps(tree)}]'.encode(encoding, "surrogatepass")
    assert check_in_pieces(text, 3).values == values(json.loads(text))


@pytest.mark.parametrize("inner", [b"{}", b"[]", b"{},[]", b"[{}],{}", b"1"])
@pytest.mark.parametrize("count", [1, 5000])
def test_json_nesting_is_limited_after_any_number_of_flat_values(inner: bytes, count: int) -> None:
    height = 2 if b"[{" in inner else 0 if inner == b"1" else 1
    flat = b",".join([inner] * count)
    max_brackets = MAX_DEPTH - height
    JSONBoundsCheck().check(b"[" * max_brackets + flat + b"]" * max_brackets)
    bounds = JSONBoundsCheck()
    bounds.check(b"[" * max_brackets)
    bounds.check(flat)
    with pytest.raises(TooMuchJSONError, match="levels"):
        JSONBoundsCheck().check(b"[" * (max_brackets + 1) + flat + b"]" * (max_brackets + 1))


@pytest.mark.parametrize("ends", ["", "\\", '"', '\\"', '"]', '", {'])
@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_escaped_quotes_in_a_json_string_do_not_count_as_values(ends: str, size: int) -> None:
    """A string that contains JSON has many escaped quotes."""
    written = '["' + '\\"' * (1 << 20) + ends
    bounds = check_in_pieces(written.encode(), size)
    assert bounds.values == 1 + written.endswith("{") + written.endswith("{")


def test_sorted_json_encoding_depends_only_on_the_values() -> None:
    for value in ({"b": [1, {"d": 2, "c": 3}], "a": "é"}, {"b": 1 << 70, "a": "\ud800"}):
        reordered = dict(reversed(value.items()))
        assert encode_sorted_json(value) == encode_sorted_json(reordered)
        assert encode_sorted_json(value) != encode_sorted_json({**value, "a": "x"})
