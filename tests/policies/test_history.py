"""Histories as clients send them back, with what they were shown of our steps."""

from typing import Any

import pytest

from policies.history import UNANSWERED, step_id, strip_steps

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASKED: Message = {"role": "user", "content": "How many files?"}
THANKS: Message = {"role": "user", "content": "And now?"}
ANSWER: Message = {"role": "assistant", "content": "Three."}
DIGEST = "Hm.\n````console\n$ ls | wc -l\n3\n[exit 0, 0.1 s, 1 line]\n````\nThat is it."
BARE = "Hm.\n$ ls | wc -l\n3\n[exit 0, 0.1 s, 1 line]\nThat is it."
"""As steps were shown once: chats are kept for years."""
DIGESTS = [
    DIGEST,
    BARE,
    "Hm.\n````console\n$ ls\n[not finished]\n````\n",
    "````console\n$ ls\n[not finished]\n````",
    "Hm.\n$ ls\n[not finished]\n",
]


def call(call_id: str, name: str = "execute_bash") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def calling(*calls: Message, content: Any = "", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def told(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": "Exit code: 0"}


ONE, TWO = step_id("0f3a", 1), step_id("0f3a", 2)


def test_a_history_without_steps_stays_as_it_is() -> None:
    said = [
        SYSTEM,
        ASKED,
        calling(call("call_7"), call("call_8", "lookup"), reasoning_content="Hm."),
        told("call_7"),
        told("call_8"),
        {**ANSWER, "reasoning": "I think.", "content": "<think>So.</think>Three."},
        {"role": "assistant", "content": [{"type": "text", "text": "Or four."}]},
        {"role": "user", "content": DIGEST},
        THANKS,
        {"role": "tool", "content": None},
        {"role": "assistant", "tool_calls": "none", "reasoning": 7},
        {"role": "assistant", "tool_calls": [None, "x", {"id": 7}]},
    ]
    assert strip_steps(said) == said


def test_the_cards_of_a_turn_leave_its_answer() -> None:
    """As Open WebUI sends them: one message a call, then the answer."""
    cards = [calling(call(ONE)), told(ONE), calling(call(TWO, "unknown")), told(TWO)]
    assert strip_steps([ASKED, *cards, ANSWER, THANKS]) == [ASKED, ANSWER, THANKS]


def test_several_calls_in_one_message_leave_it_too() -> None:
    cards = [calling(call(ONE), call(TWO), reasoning_content="Hm."), told(ONE), told(TWO)]
    assert strip_steps([ASKED, *cards, ANSWER]) == [ASKED, ANSWER]


def test_a_clients_own_calls_stay_with_their_results() -> None:
    own = call("call_w", "weather")
    mixed = [calling(call(ONE), own), told(ONE), told("call_w"), ANSWER]
    assert strip_steps([ASKED, *mixed]) == [ASKED, calling(own), told("call_w"), ANSWER]
    apart = [calling(call(ONE)), told(ONE), calling(own), told("call_w")]
    assert strip_steps([ASKED, *apart]) == [ASKED, calling(own), told("call_w")]


def test_a_call_or_a_result_that_lost_the_other_goes() -> None:
    assert strip_steps([ASKED, told(ONE), ANSWER]) == [ASKED, ANSWER]
    assert strip_steps([ASKED, calling(call(ONE)), ANSWER]) == [ASKED, ANSWER]


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("I look.", "Three.", "I look.\n\nThree."),
        ("I look.", None, "I look."),
        (
            "I look.",
            [{"type": "text", "text": "Three."}],
            [{"type": "text", "text": "I look."}, {"type": "text", "text": "Three."}],
        ),
    ],
)
def test_words_around_a_card_become_one_message(first: str, second: Any, both: Any) -> None:
    around = [calling(call(ONE), content=first), told(ONE), {**ANSWER, "content": second}]
    assert strip_steps([ASKED, *around]) == [ASKED, {"role": "assistant", "content": both}]
    del around[1]
    assert strip_steps([ASKED, *around]) == [ASKED, {"role": "assistant", "content": both}]


def test_words_before_a_clients_call_join_it() -> None:
    own = calling(call("call_w", "weather"), content=None)
    around = [calling(call(ONE), content="I look."), told(ONE), own, told("call_w")]
    assert strip_steps([ASKED, *around]) == [
        ASKED,
        {**own, "content": "I look."},
        told("call_w"),
    ]


def test_a_turn_of_nothing_but_steps_is_said_to_have_no_answer() -> None:
    stopped = [calling(call(ONE)), told(ONE)]
    unanswered = {"role": "assistant", "content": UNANSWERED}
    assert strip_steps([ASKED, *stopped, THANKS]) == [ASKED, unanswered, THANKS]
    assert strip_steps([ASKED, *stopped]) == [ASKED]
    assert strip_steps([*stopped, ASKED]) == [ASKED]


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "reasoning_text", "thinking"])
def test_thinking_that_tells_of_steps_goes_whole(field: str, digest: str) -> None:
    assert strip_steps([ASKED, {**ANSWER, field: digest}, THANKS]) == [ASKED, ANSWER, THANKS]


@pytest.mark.parametrize("digest", DIGESTS)
def test_thoughts_inside_the_answer_that_tell_of_steps_go(digest: str) -> None:
    thought = f"<think>{digest}</think>\n\n"
    said = {**ANSWER, "content": f"{thought}{thought}Three.<think>So.</think> {thought}"}
    assert strip_steps([said]) == [{**ANSWER, "content": "Three.<think>So.</think> "}]


@pytest.mark.parametrize("digest", DIGESTS)
def test_thoughts_among_the_parts_of_the_answer_that_tell_of_steps_go(digest: str) -> None:
    """As pydantic-ai, LibreChat and Mistral's clients write thoughts."""
    told = {"type": "text", "text": f"<think>{digest}</think>Three."}
    apart = {"type": "text", "text": f"<think>{digest}</think>"}
    thoughts = [{"type": "think", "think": digest}, {"type": "thinking", "thinking": digest}]
    own = {"type": "thinking", "thinking": "So."}
    said = {**ANSWER, "content": [*thoughts, apart, told, own]}
    left = {**ANSWER, "content": [{"type": "text", "text": "Three."}, own]}
    assert strip_steps([ASKED, said, THANKS]) == [ASKED, left, THANKS]
    assert strip_steps([{**ANSWER, "content": [apart]}]) == [{**ANSWER, "content": ""}]


def test_thinking_that_is_an_object_is_read_too() -> None:
    """As LobeChat keeps it."""
    said = {**ANSWER, "reasoning": {"content": DIGEST, "duration": 7}}
    assert strip_steps([said]) == [ANSWER]
    said = {**ANSWER, "reasoning": {"content": "So.", "duration": 7}}
    assert strip_steps([said]) == [said]


def test_file_fields_of_an_answer_are_removed() -> None:
    beside = {"annotations": [{"type": "url_citation"}], "images": [{"type": "image_url"}]}
    again = [ASKED, {**ANSWER, **beside}, {**ANSWER, "annotations": []}, {**THANKS, "images": 7}]
    assert strip_steps(again) == [ASKED, ANSWER, ANSWER, {**THANKS, "images": 7}]


def test_very_many_words_around_cards_become_one_message() -> None:
    # Put together one after the other, these would take minutes.
    words = "I look." * 200
    (joined,) = strip_steps([calling(call(ONE), content=words)] * 20_000)
    assert joined["content"].count(words) == 20_000


@pytest.mark.parametrize(
    "content",
    [
        DIGEST,
        f"<think>{DIGEST}",
        f"{DIGEST}</think>",
        f"</think>{DIGEST}<think>",
        f"<think>Hm.</think>{DIGEST}",
        "<think>" * 10_000,
        "<think></think>" * 10_000,
    ],
)
def test_reasoning_without_steps_is_unchanged(content: str) -> None:
    said = [{**ANSWER, "content": content}]
    assert strip_steps(said) == said


def test_strip_steps_does_not_mutate_its_argument() -> None:
    said = [ASKED, calling(call(ONE), reasoning=DIGEST), told(ONE), {**ANSWER, "reasoning": DIGEST}]
    before = [dict(message) for message in said]
    strip_steps(said)
    assert said == before
