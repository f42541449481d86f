"""Accuracy of token estimates, compared with the counts of tokenizers."""

import pytest

from policies.context import estimate_tokens, is_far_above, is_far_below, is_near_threshold

# The counts are those of the tokenizers cl100k and o200k.
COUNTED = {
    "English": (
        "The quarterly report shows that revenue grew by twelve percent, which was mostly due to"
        " demand abroad. Costs remained stable. ",
        24,
        24,
    ),
    "German": (
        "Dies ist ein Dokument darüber, wie ein Sprachmodell einen Rechner benutzt. Das Modell kann"
        " Befehle ausführen, Dateien lesen und schreiben.",
        38,
        28,
    ),
    "code": ("for row in rows:\n    total += row['price'] * row['count']\n", 17, 17),
    "Chinese": (
        "二零二四年的年度报告显示公司的收入增长了百分之十二主要原因是海外市场的需求增加。",
        40,
        24,
    ),
    "Russian": ("Модель может выполнять команды в песочнице, читать и записывать файлы.", 29, 17),
}


@pytest.mark.parametrize("name", COUNTED)
def test_token_estimate_is_within_the_stated_factor_of_the_tokenizer_counts(name: str) -> None:
    text, *counts = COUNTED[name]
    for count in counts:
        assert count / 1.5 < estimate_tokens(text) < 2.5 * count


def test_token_estimate_is_proportional_to_the_text_length() -> None:
    text = "word, 12 слово 字\n" * 100
    assert estimate_tokens(text * 2) == pytest.approx(2 * estimate_tokens(text), abs=1)
    assert (estimate_tokens(""), estimate_tokens("\ud800")) == (0, 1)


def test_token_count_is_near_a_threshold_if_it_is_within_a_factor_of_two() -> None:
    assert [is_near_threshold(tokens, 100) for tokens in (50, 51, 199, 200)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("character", ["a", "7", "é", "語", "🦊", "\ud800", ";"])
def test_text_far_below_a_token_threshold_is_neither_above_nor_near(character: str) -> None:
    for length in range(100):
        text = character * length
        if is_far_below(text, 100):
            tokens = estimate_tokens(text)
            assert (tokens > 100, is_near_threshold(tokens, 100)) == (False, False)
    assert is_far_below("a" * 25, 100)
    assert not is_far_below("a" * 26, 100)


@pytest.mark.parametrize("character", ["a", "7", "é", "語", "🦊", "\ud800", ";"])
def test_text_far_above_a_token_threshold_is_neither_below_nor_near(character: str) -> None:
    for length in range(0, 2000, 7):
        text = character * length
        if is_far_above(text, 100):
            tokens = estimate_tokens(text)
            assert (tokens > 100, is_near_threshold(tokens, 100)) == (True, False)
    assert is_far_above("a" * 920, 100)
    assert not is_far_above("a" * 919, 100)
