"""Finds the default instruction of a model's chat template: the system message that the template
adds to a request without a system message."""

import re
from dataclasses import dataclass

VALID_S = 24 * 3600.0
"""Seconds after which a default instruction is not used any more unless a probe has found it again.
It may contain the date, which changes."""
MAX_CHARS = 2_000
"""Maximum length of a default instruction. A longer one is ignored."""
_MARKUP = re.compile(r"<[^<>\n]{1,64}>|\[/?[A-Z][A-Z_]+\]|<\||\|>|[\x00-\x08\x0b-\x1f\x7f]")
"""Matches control characters, and the markup with which templates mark roles and turns, such as
`<|im_end|>` and `[INST]`."""
SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class KnownInstruction:
    """A default instruction that a probe has found."""

    text: str
    found_at: float
    """Time of the latest probe that found it, in seconds since 1970."""

    def is_outdated(self, now: float) -> bool:
        """Return True if no probe has found the instruction for `VALID_S` seconds."""
        return now - self.found_at >= VALID_S


def find_default_instruction(
    *, without_system: str, with_system: str, system: str, user: str
) -> str:
    """Return the default instruction of a chat template, or "" if there is none.

    `without_system` is the template's rendering of the user message `user`, and `with_system` the
    rendering of the system message `system` and of the same user message. `system` and `user` must
    be random texts. There is no default instruction if the template writes the system message into
    the user's turn, or if the two renderings differ in more than one passage without markup.
    """
    if with_system.count(system) != 1 or without_system.count(user) != 1:
        return ""
    before, after = with_system.split(system)
    end = len(without_system) - len(after)
    is_replaced = without_system.startswith(before) and without_system.endswith(after)
    if user not in after or not is_replaced or end < len(before):
        return ""
    default = without_system[len(before) : end].strip()
    return "" if len(default) > MAX_CHARS or _MARKUP.search(default) else default


def join_instructions(default: str, prompt: str) -> str:
    """Return the default instruction, if there is one, followed by the prompt."""
    return f"{default}{SEPARATOR}{prompt}" if default else prompt
