"""Removal of the proxy's steps from histories that clients send back."""

from typing import Any

import pytest

from policies.history import UNANSWERED, step_id, strip_steps

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "How many files?"}
FOLLOW_UP: Message = {"role": "user", "content": "And now?"}
ANSWER: Message = {"role": "assistant", "content": "Three."}
DIGEST = "Hm.\n````console\n$ ls | wc -l\n3\n[exit 0, 0.1 s, 1 line]\n````\nThat is it."
BARE = "Hm.\n$ ls | wc -l\n3\n[exit 0, 0.1 s, 1 line]\nThat is it."
"""Old text format of steps. Stored chats still contain it."""
DIGESTS = [
    DIGEST,
    BARE,
    "Hm.\n````console\n$ ls\n[not finished]\n````\n",
    "````console\n$ ls\n[not finished]\n````",
    "Hm.\n$ ls\n[not finished]\n",
]


def call(call_id: str, name: str = "execute_bash") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def assistant_message(*calls: Message, content: Any = "", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def tool_result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": "Exit code: 0"}


ONE, TWO = step_id("0f3a", 1), step_id("0f3a", 2)


def test_history_without_steps_is_unchanged() -> None:
    messages = [
        SYSTEM,
        QUESTION,
        assistant_message(call("call_7"), call("call_8", "lookup"), reasoning_content="Hm."),
        tool_result("call_7"),
        tool_result("call_8"),
        {**ANSWER, "reasoning": "I think.", "content": "<think>So.</think>Three."},
        {"role": "assistant", "content": [{"type": "text", "text": "Or four."}]},
        {"role": "user", "content": DIGEST},
        FOLLOW_UP,
        {"role": "tool", "content": None},
        {"role": "assistant", "tool_calls": "none", "reasoning": 7},
        {"role": "assistant", "tool_calls": [None, "x", {"id": 7}]},
    ]
    assert strip_steps(messages) == messages


def test_steps_before_an_answer_are_removed() -> None:
    """Open WebUI sends one message for each call, then the answer."""
    cards = [
        assistant_message(call(ONE)),
        tool_result(ONE),
        assistant_message(call(TWO, "unknown")),
        tool_result(TWO),
    ]
    assert strip_steps([QUESTION, *cards, ANSWER, FOLLOW_UP]) == [QUESTION, ANSWER, FOLLOW_UP]


def test_several_steps_in_one_message_are_removed() -> None:
    cards = [
        assistant_message(call(ONE), call(TWO), reasoning_content="Hm."),
        tool_result(ONE),
        tool_result(TWO),
    ]
    assert strip_steps([QUESTION, *cards, ANSWER]) == [QUESTION, ANSWER]


def test_client_calls_and_their_results_are_kept() -> None:
    own = call("call_w", "weather")
    mixed = [assistant_message(call(ONE), own), tool_result(ONE), tool_result("call_w"), ANSWER]
    assert strip_steps([QUESTION, *mixed]) == [
        QUESTION,
        assistant_message(own),
        tool_result("call_w"),
        ANSWER,
    ]
    apart = [
        assistant_message(call(ONE)),
        tool_result(ONE),
        assistant_message(own),
        tool_result("call_w"),
    ]
    assert strip_steps([QUESTION, *apart]) == [
        QUESTION,
        assistant_message(own),
        tool_result("call_w"),
    ]


def test_step_without_its_call_or_result_is_removed() -> None:
    assert strip_steps([QUESTION, tool_result(ONE), ANSWER]) == [QUESTION, ANSWER]
    assert strip_steps([QUESTION, assistant_message(call(ONE)), ANSWER]) == [QUESTION, ANSWER]


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
def test_texts_around_a_step_are_joined(first: str, second: Any, both: Any) -> None:
    messages = [
        assistant_message(call(ONE), content=first),
        tool_result(ONE),
        {**ANSWER, "content": second},
    ]
    assert strip_steps([QUESTION, *messages]) == [QUESTION, {"role": "assistant", "content": both}]
    del messages[1]
    assert strip_steps([QUESTION, *messages]) == [QUESTION, {"role": "assistant", "content": both}]


def test_text_before_removed_steps_becomes_the_content_of_the_client_tool_call_message() -> None:
    own = assistant_message(call("call_w", "weather"), content=None)
    messages = [
        assistant_message(call(ONE), content="I look."),
        tool_result(ONE),
        own,
        tool_result("call_w"),
    ]
    assert strip_steps([QUESTION, *messages]) == [
        QUESTION,
        {**own, "content": "I look."},
        tool_result("call_w"),
    ]


def test_turn_with_steps_but_no_answer_becomes_a_message_that_says_so() -> None:
    stopped = [assistant_message(call(ONE)), tool_result(ONE)]
    unanswered = {"role": "assistant", "content": UNANSWERED}
    assert strip_steps([QUESTION, *stopped, FOLLOW_UP]) == [QUESTION, unanswered, FOLLOW_UP]
    assert strip_steps([QUESTION, *stopped]) == [QUESTION]
    assert strip_steps([*stopped, QUESTION]) == [QUESTION]


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "reasoning_text", "thinking"])
def test_reasoning_with_steps_is_removed(field: str, digest: str) -> None:
    assert strip_steps([QUESTION, {**ANSWER, field: digest}, FOLLOW_UP]) == [
        QUESTION,
        ANSWER,
        FOLLOW_UP,
    ]


@pytest.mark.parametrize("digest", DIGESTS)
def test_think_tags_with_steps_are_removed_from_the_answer(digest: str) -> None:
    thought = f"<think>{digest}</think>\n\n"
    message = {**ANSWER, "content": f"{thought}{thought}Three.<think>So.</think> {thought}"}
    assert strip_steps([message]) == [{**ANSWER, "content": "Three.<think>So.</think> "}]


@pytest.mark.parametrize("digest", DIGESTS)
def test_reasoning_parts_with_steps_are_removed_from_the_answer(digest: str) -> None:
    """pydantic-ai, LibreChat and Mistral's clients send reasoning as content parts."""
    with_answer = {"type": "text", "text": f"<think>{digest}</think>Three."}
    only_steps = {"type": "text", "text": f"<think>{digest}</think>"}
    reasoning = [{"type": "think", "think": digest}, {"type": "thinking", "thinking": digest}]
    own = {"type": "thinking", "thinking": "So."}
    message = {**ANSWER, "content": [*reasoning, only_steps, with_answer, own]}
    expected = {**ANSWER, "content": [{"type": "text", "text": "Three."}, own]}
    assert strip_steps([QUESTION, message, FOLLOW_UP]) == [QUESTION, expected, FOLLOW_UP]
    assert strip_steps([{**ANSWER, "content": [only_steps]}]) == [{**ANSWER, "content": ""}]


def test_reasoning_object_with_steps_is_removed() -> None:
    """LobeChat stores reasoning as an object."""
    message = {**ANSWER, "reasoning": {"content": DIGEST, "duration": 7}}
    assert strip_steps([message]) == [ANSWER]
    message = {**ANSWER, "reasoning": {"content": "So.", "duration": 7}}
    assert strip_steps([message]) == [message]


def test_file_fields_of_an_answer_are_removed() -> None:
    files = {"annotations": [{"type": "url_citation"}], "images": [{"type": "image_url"}]}
    again = [
        QUESTION,
        {**ANSWER, **files},
        {**ANSWER, "annotations": []},
        {**FOLLOW_UP, "images": 7},
    ]
    assert strip_steps(again) == [QUESTION, ANSWER, ANSWER, {**FOLLOW_UP, "images": 7}]


def test_many_texts_around_steps_are_joined_in_linear_time() -> None:
    # Joining one text after the other would take minutes.
    text = "I look." * 200
    (joined,) = strip_steps([assistant_message(call(ONE), content=text)] * 20_000)
    assert joined["content"].count(text) == 20_000


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
    messages = [{**ANSWER, "content": content}]
    assert strip_steps(messages) == messages


def test_strip_steps_does_not_mutate_its_argument() -> None:
    messages = [
        QUESTION,
        assistant_message(call(ONE), reasoning=DIGEST),
        tool_result(ONE),
        {**ANSWER, "reasoning": DIGEST},
    ]
    before = [dict(message) for message in messages]
    strip_steps(messages)
    assert messages == before
