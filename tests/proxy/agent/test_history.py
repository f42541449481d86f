"""The history grows; where it must shrink, a new segment begins."""

import copy
import random
from typing import Any

import pytest

from proxy.agent.history import STUB_CHARS, History, text_of

CLIENT = [
    {"role": "system", "content": "s" * 9000},
    {"role": "user", "content": "u" * 9000},
    {"role": "tool", "tool_call_id": "theirs", "content": "t" * 9000},
]


def observed(length: int, mark: str = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": mark * length}


def history(*messages: dict[str, Any]) -> History:
    made = History(CLIENT)
    made.append(*messages)
    return made


def test_it_does_not_touch_the_clients_list() -> None:
    given = list(CLIENT)
    made = History(given)
    made.append(observed(1))
    assert given == CLIENT
    assert made.messages == [*CLIENT, observed(1)]


def test_a_short_observation_cannot_be_shortened() -> None:
    made = history(observed(2 * STUB_CHARS))
    assert not made.shorten()
    assert made.segments == [[*CLIENT, observed(2 * STUB_CHARS)]]


def test_the_largest_is_cut_to_its_head_and_tail_in_a_new_segment() -> None:
    long = {"role": "tool", "tool_call_id": "c", "content": "a" * 5000 + "b" * 5000, "extra": 1}
    made = history(observed(900), long, observed(900))
    before = copy.deepcopy(made.messages)
    assert made.shorten()
    assert made.segments[0] == before
    assert made.messages == made.segments[1]
    shortened = made.messages[-2]
    assert {**shortened, "content": ""} == {**long, "content": ""}
    assert shortened["content"] == (
        "a"
        * 200
        + "\n[... 9600 characters of this result were left out to fit the context window; run the"
        " command again if you need them ...]\n" + "b" * 200
    )
    assert [*made.messages[:-2], made.messages[-1]] == [*before[:-2], before[-1]]


def test_a_third_of_all_observations_goes_at_once_the_oldest_of_equals_first() -> None:
    made = history(observed(5000, "a"), observed(5000, "b"), observed(5000, "c"))
    made.shorten()
    assert [len(message["content"]) > 1000 for message in made.messages[3:]] == [False, False, True]


def test_results_of_calls_written_as_text_count_as_observations() -> None:
    made = history({"role": "user", "content": "Result of execute_bash:\n" + "x" * 5000})
    assert made.shorten()


def test_the_models_own_words_are_never_shortened() -> None:
    assert not history({"role": "assistant", "content": "x" * 50_000}).shorten()


@pytest.mark.parametrize("seed", range(20))
def test_shortening_ends_and_leaves_all_but_observations_alone(seed: int) -> None:
    rng = random.Random(seed)
    words = {"role": "assistant", "content": "w" * 5000}
    made = history(*(rng.choice([words, observed(rng.randint(0, 20_000))]) for _ in range(12)))
    first = copy.deepcopy(made.messages)
    for _ in range(20):
        size = sum(len(message["content"]) for message in made.messages)
        if not made.shorten():
            break
        assert sum(len(message["content"]) for message in made.messages) < size
    assert not made.shorten()
    assert made.segments[0] == first
    for before, after in zip(first, made.messages, strict=True):
        if before["role"] == "assistant" or before in CLIENT:
            assert after == before
        assert {**after, "content": ""} == {**before, "content": ""}
    assert all(
        len(message["content"]) <= 2 * STUB_CHARS
        for message in made.messages[3:]
        if message["role"] == "tool"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}, "c"], "ab"),
        (7, ""),
    ],
)
def test_a_messages_text(content: object, text: str) -> None:
    assert text_of({"content": content}) == text
    assert text_of({}) == ""
