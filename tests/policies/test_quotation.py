"""Detection of an error message that quotes the request, and the limit of the search."""

import pytest

from policies.reply_checks import MAX_SEARCHED_CHARS, is_quoted

MESSAGE = "tools are not supported"


class Unsearched(str):
    """A text whose search fails the test."""

    __slots__ = ()

    def lower(self) -> str:
        raise AssertionError("a long text is searched")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"content": "Why that Tools Are NOT supported?"}]}, True),
        ({MESSAGE: 1}, True),
        ([["tools are", "not supported"], 5, None], False),
        ({"messages": [{"content": Unsearched("QUJD" * 1000)}, {"content": MESSAGE}]}, True),
        ({"messages": [{"content": Unsearched("QUJD" * 1000)}]}, False),
    ],
)
def test_error_message_that_occurs_in_the_request_counts_as_quoted(
    body: object, expected: bool
) -> None:
    assert is_quoted(MESSAGE, body) is expected
    assert not is_quoted("", body)


def test_error_message_counts_as_quoted_if_the_request_is_too_long_to_search() -> None:
    half = "so it " * (MAX_SEARCHED_CHARS // 12)
    assert not is_quoted(MESSAGE, [half, half])
    assert is_quoted(MESSAGE, [Unsearched(" too much"), half, half])
