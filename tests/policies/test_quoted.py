"""What counts as quoted of a request, and how much of it is searched."""

import pytest

from policies.reply_checks import MAX_SEARCHED_CHARS, is_quoted

WORDS = "tools are not supported"


class Unsearched(str):
    """A text that nobody should search."""

    __slots__ = ()

    def lower(self) -> str:
        raise AssertionError("a long text is searched")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"content": "Why that Tools Are NOT supported?"}]}, True),
        ({WORDS: 1}, True),
        ([["tools are", "not supported"], 5, None], False),
        ({"messages": [{"content": Unsearched("QUJD" * 1000)}, {"content": WORDS}]}, True),
        ({"messages": [{"content": Unsearched("QUJD" * 1000)}]}, False),
    ],
)
def test_words_are_quoted_that_stand_in_a_string(body: object, expected: bool) -> None:
    assert is_quoted(WORDS, body) is expected
    assert not is_quoted("", body)


def test_words_may_be_quoted_by_more_prose_than_is_searched() -> None:
    half = "so it " * (MAX_SEARCHED_CHARS // 12)
    assert not is_quoted(WORDS, [half, half])
    assert is_quoted(WORDS, [Unsearched(" too much"), half, half])
