"""Prompts for small requests, and phrases of the proxy that answers must not contain."""

import re
from typing import Any

PROMPTS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Write a haiku about the sea.",
    "Name three primary colours.",
    "Translate 'good morning' into Spanish.",
    "Is the sun a star? Answer yes or no.",
    "List the first five prime numbers.",
    "What is the opposite of hot?",
    "Explain in one sentence what a computer is.",
    "Write a Python function that adds two numbers.",
)
OURS = re.compile(
    r"\bsubmit\b|execute_bash|str_replace_editor|/testbed|isolated Linux|No tool was called"
    r"|Tools are no longer|go on with the tools|in the form it asked for|limit of steps"
    r"|Nobody can answer questions|refer to produced files",
    re.IGNORECASE,
)
"""Phrases of the proxy's prompts, tools and instructions."""
LINE = "Line {} of the book of sand, as it was told.\n"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The JSON schema of a city."""


def book(lines: int) -> str:
    """Return a text of `lines` lines, about 13 tokens each."""
    return "".join(LINE.format(number) for number in range(lines))
