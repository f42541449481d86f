"""Which of a run's model calls the usage is of that its client is told."""

from collections.abc import Mapping
from typing import Literal, TypeGuard, get_args

UsageOf = Literal["all_calls", "last_call"]
"""all_calls: their sum, what the answer cost; last_call: how full the context is."""
CHOICES: tuple[UsageOf, ...] = get_args(UsageOf)


def is_choice(word: object) -> TypeGuard[UsageOf]:
    """Whether a client may ask for it."""
    return word in CHOICES


def suited_usage(headers: Mapping[str, str]) -> UsageOf:
    """What is told to a client that did not say; `headers` are found in lower case. Coding agents
    shorten a conversation by it, which a sum over several calls would have them do too early."""
    is_codex = headers.get("originator", "").startswith("codex")
    is_opencode = headers.get("user-agent", "").startswith("opencode/")
    return "last_call" if is_codex or is_opencode else "all_calls"
