"""How a run shows its steps, and the words for them in its thinking."""

import re
from collections.abc import Iterable
from typing import Literal, TypeGuard, get_args

Steps = Literal["off", "reasoning", "items", "events"]
"""off: not at all; reasoning: as text among the model's thinking; items: as Open WebUI's tool
cards; events: as server-sent events of their own."""
StepsSetting = Literal["auto", "off", "reasoning", "items", "events"]
"""What a server is set to. auto: as suits the client."""
NarrationSetting = Literal["content", "reasoning"]
"""How a stream tells what the model says before a tool call. content: as it comes, set apart from
the answer by an empty line; reasoning: apart from all content, which then waits until it is known
to be the answer."""
PROFILES: tuple[Steps, ...] = get_args(Steps)

_OPEN_WEBUI = "x-openwebui-"
NOT_FINISHED = "[not finished]"
OUTPUT_LEFT_OUT = "[... output left out ...]"
_OUTCOME = re.compile(
    rf"^(?:\[(?:exit -?\d+, )?\d+\.\d s(?:, \d+ lines?)?\]|{re.escape(NOT_FINISHED)})$",
    re.MULTILINE,
)


def is_profile(word: object) -> TypeGuard[Steps]:
    """Whether a client may ask for it."""
    return word in PROFILES


def is_shown(tool: str) -> bool:
    """Return whether a tool's calls are shown as steps. What is submitted is the answer."""
    return tool != "submit"


def suited(setting: StepsSetting, headers: Iterable[str]) -> Steps:
    """What is shown to a client that did not ask; `headers` are the names of those it sent."""
    if setting != "auto":
        return setting
    is_open_webui = any(name.lower().startswith(_OPEN_WEBUI) for name in headers)
    return "items" if is_open_webui else "reasoning"


def suited_to_messages(setting: StepsSetting, *, code_execution: bool, thinking: bool) -> Steps:
    """The same where the API is Anthropic's: many of its clients take the first block of an answer
    for its text, so that only what they have asked for stands before it."""
    if setting != "auto":
        return setting
    if code_execution:
        return "items"
    return "reasoning" if thinking else "off"


def suited_to_responses(setting: StepsSetting, *, shows_items: bool) -> Steps:
    """The same in OpenAI's newer API: items only for who asked for a tool that makes them, for
    others take such an item for a call of a tool of theirs."""
    if setting in ("off", "reasoning", "events"):
        return setting
    return "items" if shows_items else "reasoning"


def outcome(exit_code: int | None, duration_s: float, output_lines: int | None) -> str:
    """The line that ends a step."""
    parts = [] if exit_code is None else [f"exit {exit_code}"]
    parts.append(f"{duration_s:.1f} s")
    if output_lines is not None:
        parts.append(f"{output_lines} {'line' if output_lines == 1 else 'lines'}")
    return f"[{', '.join(parts)}]"


def tells_steps(thinking: str) -> bool:
    """Whether thinking has steps in it: words of ours, which the model did not think."""
    return _OUTCOME.search(thinking) is not None
