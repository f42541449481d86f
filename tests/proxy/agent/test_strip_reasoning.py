"""Removal of reasoning from the text of a model."""

import pytest

from proxy.agent.context import strip_reasoning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("said", "said"),
        ("<think>a</think>\n\nsaid", "said"),
        ("a</think>said", "said"),  # the chat template has opened the tag
        ("<think>a", ""),  # truncated
        ("one <think>a</think>two<think>b", "one two"),
        ("<think>a<think>b</think>c</think>said", "said"),
    ],
)
def test_strip_reasoning_removes_text_in_think_tags(text: str, expected: str) -> None:
    assert strip_reasoning(text) == expected
