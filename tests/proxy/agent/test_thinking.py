"""Reasoning is separated from the model's text."""

import pytest

from proxy.agent.context import strip_reasoning


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("said", "said"),
        ("<think>a</think>\n\nsaid", "said"),
        ("a</think>said", "said"),  # the chat template has opened it
        ("<think>a", ""),  # cut off
        ("one <think>a</think>two<think>b", "one two"),
        ("<think>a<think>b</think>c</think>said", "said"),
    ],
)
def test_reasoning_is_stripped(text: str, said: str) -> None:
    assert strip_reasoning(text) == said
