"""Detection of the proxy's own texts in the reply of a model."""

import pytest

from policies.limits import StopReason
from policies.prompts import INSTRUCTIONS, final_answer_request, summary_request, system_prompt
from policies.reply_checks import EchoCheck, ProxyTexts

PROMPT = system_prompt()
OWN = ProxyTexts([PROMPT], INSTRUCTIONS)


def echo_at(text: str, client: str = "", piece: int = 4) -> int | None:
    """Return the number of characters after which a reply is recognized as an echo, or None."""
    check = EchoCheck(OWN, [client])
    for at in range(0, len(text), piece):
        if check.add_and_check(text[at : at + piece]):
            return at + piece
    return len(text) if check.add_and_check("", at_end=True) else None


@pytest.mark.parametrize(
    "text",
    [
        final_answer_request(StopReason.WALL_TIME),
        f"Sure! {final_answer_request(StopReason.MAX_TURNS)}",
        summary_request(500),
        *INSTRUCTIONS[:2],
        PROMPT,
        PROMPT.upper(),
        f"**{PROMPT[40:400]}**",
        "\n".join(PROMPT.split(". ")[1:4]),
    ],
)
def test_echo_of_the_proxys_own_text_is_recognized(text: str) -> None:
    assert echo_at(text) is not None


def test_echo_is_recognized_long_before_its_end() -> None:
    found = echo_at(PROMPT)
    assert found is not None
    assert found < 120


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "The sandbox has no network, so I worked with the file you gave.",
        "I ran it in a Linux sandbox through execute_bash; the result is 42.",
        "The time is up: it is 12:00.",
        "No tool was called by the client, so the log is empty.",
        "I have written the chart to /testbed/output/chart.png.",
        "Tools are no longer available in shop 7. Write to the owner for the final price.",
        "Call me when you are done with the complete list.",
        "",
    ],
)
def test_ordinary_answer_is_no_echo(text: str) -> None:
    assert echo_at(text) is None


def test_very_long_words_are_searched_for_an_echo_in_linear_time() -> None:
    check = EchoCheck(OWN, [])
    for _ in range(3):  # takes seconds; an hour if the search restarts at each letter
        assert not check.add_and_check("3" * 300_000 + "\n")
    assert check.add_and_check(PROMPT)


def test_echo_after_a_word_of_any_length_is_recognized() -> None:
    assert echo_at("9" * 1000 + " " + PROMPT) is not None


def test_quotation_of_client_text_is_no_echo() -> None:
    assert echo_at(PROMPT) is not None
    assert echo_at(PROMPT, client=f"What does this mean? {PROMPT}") is None


def test_long_client_text_may_be_quoted_from_both_its_ends() -> None:
    filler = "Some other words. " * 100_000
    assert echo_at(PROMPT, client=f"{PROMPT} {filler}") is None
    assert echo_at(PROMPT, client=f"{filler} {PROMPT}") is None
    assert echo_at(PROMPT, client=filler) is not None


def test_text_is_suspect_while_it_may_become_an_echo() -> None:
    check = EchoCheck(OWN, [])
    own = " ".join(PROMPT.split()[:6])
    assert not check.add_and_check(own + " ")
    assert check.is_suspect
    assert not check.add_and_check("something quite different follows here ")
    assert not check.is_suspect


def test_incomplete_word_is_not_searched_for_an_echo() -> None:
    own = ProxyTexts([], ["Write the final answer now."])
    check = EchoCheck(own, [])
    assert not check.add_and_check("Write the final answer no")
    assert not check.add_and_check("t yet")
    assert not check.add_and_check(".")
