"""How much JSON a request may have, however its bytes are cut and dressed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.json_bounds import (
    MAX_DEPTH,
    MAX_STRUCTURE_BYTES,
    MAX_VALUES,
    JSONBounds,
    TooMuchJSONError,
)

STRINGS = st.text(alphabet='{}[],:"\\a\u2222é\n', max_size=8)
TREES = st.recursive(
    st.none() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


def checked(text: bytes, size: int) -> JSONBounds:
    bounds = JSONBounds()
    for start in range(0, len(text), size):
        bounds.check(text[start : start + size])
    return bounds


def values(tree: object) -> int:
    """Commas and brackets that open."""
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
def test_values_are_counted_however_the_bytes_are_cut(
    tree: object, size: int, is_ascii: bool, encoding: str
) -> None:
    text = "    " + json.dumps(tree, ensure_ascii=is_ascii)
    bounds = checked(text.encode(encoding), size)
    assert bounds.values == values(tree)


@given(TREES, st.integers(1, 9))
def test_nesting_above_the_limit_is_refused_for_any_piece_size(tree: object, size: int) -> None:
    around = MAX_DEPTH - depth(tree)
    text = json.dumps(tree).encode()
    checked(b"[" * around + text + b"]" * around + b"    ", size)
    if depth(tree):
        with pytest.raises(TooMuchJSONError, match="64 levels"):
            checked(b"[" * (around + 1) + text + b"]" * (around + 1) + b"    ", size)


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
def test_too_much_is_refused_before_it_is_all_there(text: bytes, size: int) -> None:
    with pytest.raises(TooMuchJSONError):
        checked(text, size)


def test_strings_have_no_bound_here() -> None:
    text = json.dumps({"file": "QUJD" * (MAX_STRUCTURE_BYTES // 2), "text": "{,[" * MAX_VALUES})
    assert checked(text.encode(), 1 << 16).values == 2


def test_a_signs_second_byte_is_no_quotation_mark() -> None:
    """In UTF-16, half of U+2222 looks like one: behind it, nothing would be counted."""
    text = '["\u2222",' + "{}," * MAX_VALUES
    with pytest.raises(TooMuchJSONError):
        checked(text.encode("utf-16-le"), 1000)


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@settings(deadline=None)
@given(TREES, st.lists(st.sampled_from("\ud800\udc00"), max_size=4), st.sampled_from(WIDE))
def test_values_are_counted_despite_lone_surrogates(
    tree: object, surrogates: list[str], encoding: str
) -> None:
    text = f'["{"".join(surrogates)}", {json.dumps(tree)}]'.encode(encoding, "surrogatepass")
    assert checked(text, 3).values == values(json.loads(text))


@pytest.mark.parametrize("inner", [b"{}", b"[]", b"{},[]", b"[{}],{}", b"1"])
@pytest.mark.parametrize("count", [1, 5000])
def test_the_deepest_level_counts_beside_any_number_of_flat_ones(inner: bytes, count: int) -> None:
    height = 2 if b"[{" in inner else 0 if inner == b"1" else 1
    flat = b",".join([inner] * count)
    most = MAX_DEPTH - height
    JSONBounds().check(b"[" * most + flat + b"]" * most)
    bounds = JSONBounds()
    bounds.check(b"[" * most)
    bounds.check(flat)
    with pytest.raises(TooMuchJSONError, match="levels"):
        JSONBounds().check(b"[" * (most + 1) + flat + b"]" * (most + 1))


@pytest.mark.parametrize("ends", ["", "\\", '"', '\\"', '"]', '", {'])
@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_a_string_full_of_quotes_is_passed_over_at_once(ends: str, size: int) -> None:
    """JSON as a text in JSON: each quote in it looked like the beginning of another string."""
    written = '["' + '\\"' * (1 << 20) + ends
    bounds = checked(written.encode(), size)
    assert bounds.values == 1 + written.endswith("{") + written.endswith("{")
