"""Detection of answers among the texts of a model. Other texts announce more work."""

import pytest

from policies.answer_form import is_answer


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "The answer is 42.",
        "  \n There are 42 files.\n ",
        "I counted the files. There are 42.",
        "Let me explain it:\n\nThe sum is 42.",
        "First, I need to count.\nThere are 42.",
        "I have saved the chart to /testbed/output/plot.png.",
        "I don't know.",
        "I cannot do that.",
        "Done!",
        '{"n": 42}',
        "```python\nprint(42)\n```",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        r"\boxed{42}",
        "B",
        "Willing or not, I will.",
        "Letting it run took 3 s.",
        "Would you like me to go on?",
        "42\n\nLet me know if you need anything else!",
        "42\n\nLet me know how it goes.",
        "I'll be happy to help with more.",
        "I will be glad to explain.",
        "答えは42です。",
        "Thus x = 42",
        "The next step is up to you.",
        "Illustration: see plot.png.",
    ],
)
def test_prose_that_announces_no_next_step_is_a_final_answer(text: str) -> None:
    assert is_answer(text, "stop")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "Let me check",
        "Let me check the files.",
        "Let's look at the data.",
        "Let us begin.",
        "I'll run the script now.",
        "I will now count the files.",
        "I'm going to install numpy.",
        "I am going to compute it.",
        "I need to see the file first.",
        "Now I'll run it.",
        "Next, I will plot it.",
        "Okay, let me try again.",
        "OK so now let me try again.",
        "First, let me look around.",
        "Then I'll sum them.",
        "- Let me see.",
        "**Let me verify this.**",
        "I found the file. It has 3 lines.\n\nNow let me count them.",
        "Counting the files:",
        "Here is what I will do:",
        "Working on it...",
        "Working on it\N{HORIZONTAL ELLIPSIS}",
    ],
)
def test_prose_that_announces_more_work_is_no_final_answer(text: str) -> None:
    assert not is_answer(text, "stop")


@pytest.mark.parametrize("finish_reason", ["stop", "tool_calls", "content_filter", "eos"])
def test_complete_prose_is_a_final_answer_for_any_finish_reason_but_length(
    finish_reason: str,
) -> None:
    assert is_answer("There are 42.", finish_reason)


def test_truncated_prose_is_no_final_answer() -> None:
    assert not is_answer("There are 42.", "length")
