"""Detection of endless repetition, without false alarms for repetitive but legitimate texts."""

import pytest

from policies.reply_checks import CHECK_EVERY_CHARS, RepetitionCheck, repeated_suffix_length
from tests.policies.legitimate_texts import legitimate_texts

LEGITIMATE = dict(legitimate_texts())
PASSAGES = (
    "I am sorry. ",
    "The capital of France is Paris. It has been the capital since the tenth century.\n\n",
    "1. Open the file.\n2. Read the file.\n3. Close the file.\n",
    "<tool>\n",
    "ha",
    "A paragraph of some length, in which a model explains at leisure what it has explained before,"
    " and to which it will come back as soon as it has come to its end, word for word. " * 2,
)


def runaway_at(text: str, piece: int = 5) -> int | None:
    """Return the number of characters after which a model that writes the text is stopped, or
    None."""
    check = RepetitionCheck()
    for at in range(0, len(text), piece):
        if check.add_and_check(text[at : at + piece]):
            return at + piece
    return None


def test_repetition_tests_have_at_least_200_legitimate_texts() -> None:
    assert len(LEGITIMATE) >= 200


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_text_is_not_taken_for_runaway_repetition(name: str) -> None:
    assert runaway_at(LEGITIMATE[name]) is None


@pytest.mark.parametrize("passage", PASSAGES)
@pytest.mark.parametrize("before", ["", "Here is what I know about it. "])
def test_passage_repeated_without_end_is_recognized_as_runaway_repetition(
    passage: str, before: str
) -> None:
    runaway = before + passage * (20_000 // len(passage))
    cut = runaway_at(runaway)
    assert cut is not None
    assert cut <= len(before) + 8 * len(passage) + 4_000 + CHECK_EVERY_CHARS + 5


@pytest.mark.parametrize("passage", ["0", "0, ", "00 00\n", "| 0 | 0 |\n"])
def test_repetitive_data_has_a_higher_repetition_limit_than_prose(passage: str) -> None:
    cut = runaway_at(passage * (40_000 // len(passage)))
    assert cut is not None
    assert 16_000 <= cut <= 17_000


def test_text_that_continues_after_a_repetition_has_no_repeated_suffix() -> None:
    assert repeated_suffix_length("I am sorry. " * 1000 + "But here is the answer: 42.") == 0


def test_runaway_repetition_is_found_in_large_pieces() -> None:
    assert runaway_at("I am sorry. " * 2000, piece=30_000) is not None
