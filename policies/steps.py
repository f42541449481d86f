"""The default for what a client is shown of a run's steps and of its usage, and the words that
stand for steps in a model's thinking."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeGuard, get_args

StepsMode = Literal["off", "reasoning", "items", "events"]
"""off: not at all; reasoning: as text among the model's thinking; items: as Open WebUI's tool
cards; events: as server-sent events of their own."""
StepsSetting = Literal["auto", "off", "reasoning", "items", "events"]
"""The server's setting. auto: as suits the client."""
NarrationSetting = Literal["content", "reasoning"]
"""Where a stream puts what the model says before a tool call. content: as it comes, set apart from
the answer by an empty line; reasoning: apart from all content, which then waits until it is known
to be the answer."""
STEPS_MODES: tuple[StepsMode, ...] = get_args(StepsMode)
UsageScope = Literal["all_calls", "last_call"]
"""The model calls whose usage a client is told. all_calls: their sum, what the answer cost;
last_call: how full the context is."""
USAGE_SCOPES: tuple[UsageScope, ...] = get_args(UsageScope)

_OPEN_WEBUI = "x-openwebui-"
NOT_FINISHED = "[not finished]"
OUTPUT_LEFT_OUT = "[... output left out ...]"
_OUTCOME = re.compile(
    rf"^(?:\[(?:exit -?\d+, )?\d+\.\d s(?:, \d+ lines?)?\]|{re.escape(NOT_FINISHED)})$",
    re.MULTILINE,
)


def is_steps_mode(word: object) -> TypeGuard[StepsMode]:
    """Return True if a client may ask for steps to be shown this way."""
    return word in STEPS_MODES


def is_shown(tool: str) -> bool:
    """Return True if a tool's calls are shown as steps. What is submitted is the answer."""
    return tool != "submit"


def default_mode(setting: StepsSetting, headers: Iterable[str]) -> StepsMode:
    """Return how steps are shown to a client that did not ask; `headers` are the names of those it
    sent."""
    if setting != "auto":
        return setting
    is_open_webui = any(name.lower().startswith(_OPEN_WEBUI) for name in headers)
    return "items" if is_open_webui else "reasoning"


def default_mode_for_messages(
    setting: StepsSetting, *, code_execution: bool, thinking: bool
) -> StepsMode:
    """Return the same for Anthropic's API. Many of its clients take the first block of an answer
    for its text, so that only what they have asked for stands before it."""
    if setting != "auto":
        return setting
    if code_execution:
        return "items"
    return "reasoning" if thinking else "off"


def default_mode_for_responses(setting: StepsSetting, *, shows_items: bool) -> StepsMode:
    """Return the same for OpenAI's Responses API. Only clients that asked for a tool which makes
    items get items: others take such an item for a call of one of their own tools."""
    if setting in ("off", "reasoning", "events"):
        return setting
    return "items" if shows_items else "reasoning"


def outcome_line(exit_code: int | None, duration_s: float, output_lines: int | None) -> str:
    """Return the line that ends a step."""
    parts = [] if exit_code is None else [f"exit {exit_code}"]
    parts.append(f"{duration_s:.1f} s")
    if output_lines is not None:
        parts.append(f"{output_lines} {'line' if output_lines == 1 else 'lines'}")
    return f"[{', '.join(parts)}]"


def contains_steps(thinking: str) -> bool:
    """Return True if the thinking contains steps: the proxy's words, which the model did not
    think."""
    return _OUTCOME.search(thinking) is not None


def is_usage_scope(word: object) -> TypeGuard[UsageScope]:
    """Return True if a client may ask for the usage of these model calls."""
    return word in USAGE_SCOPES


def default_usage_scope(headers: Mapping[str, str]) -> UsageScope:
    """Return whose usage is told to a client that did not ask; `headers` are found in lower case.

    Coding agents shorten a conversation by it, which a sum over several calls would have them do
    too early.
    """
    is_codex = headers.get("originator", "").startswith("codex")
    is_opencode = headers.get("user-agent", "").startswith("opencode/")
    return "last_call" if is_codex or is_opencode else "all_calls"
