"""The modes in which a client gets the steps and the usage of a run, and the format of steps in
reasoning."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from policies.headers import RequestHeader

StepsMode = Literal["off", "reasoning", "items", "events"]
"""off: steps are not shown. reasoning: as text in the model's reasoning. items: as tool cards of
Open WebUI. events: as separate server-sent events."""
StepsSetting = Literal["auto", "off", "reasoning", "items", "events"]
"""The server's setting for clients that ask for no mode. auto: the mode depends on the client."""
NarrationSetting = Literal["content", "reasoning"]
"""The field of a stream for text that precedes a tool call. content: the text is streamed as
content, followed by an empty line. reasoning: the text is streamed as reasoning, and content is
therefore delayed until it is known to be the answer."""
STEPS_MODES: tuple[StepsMode, ...] = get_args(StepsMode)
UsageScope = Literal["all_calls", "last_call"]
"""The model calls in the usage of an answer. all_calls: the sum of all calls, which is the cost.
last_call: the last call, which shows how full the context window is."""
USAGE_SCOPES: tuple[UsageScope, ...] = get_args(UsageScope)

NOT_FINISHED = "[not finished]"
OUTPUT_LEFT_OUT = "[... output left out ...]"
_OUTCOME_LINE = re.compile(
    rf"^(?:\[(?:exit -?\d+, )?\d+\.\d s(?:, \d+ lines?)?\]|{re.escape(NOT_FINISHED)})$",
    re.MULTILINE,
)


def is_shown(tool: str) -> bool:
    """Return True if calls of a tool are shown as steps. Calls of submit are not shown, because
    their argument is the answer."""
    return tool != "submit"


def default_mode(setting: StepsSetting, headers: Iterable[str]) -> StepsMode:
    """Return the mode for a client that did not ask for a mode, by the names of its headers."""
    if setting != "auto":
        return setting
    is_open_webui = any(
        name.lower().startswith(RequestHeader.OPEN_WEBUI_PREFIX) for name in headers
    )
    return "items" if is_open_webui else "reasoning"


def default_mode_for_messages(
    setting: StepsSetting, *, has_code_execution: bool, wants_thinking: bool
) -> StepsMode:
    """Return the mode for a client of Anthropic's API that did not ask for a mode.

    Many of these clients read the first block of an answer as its text. So no other block may
    precede the text unless the client has asked for such blocks.
    """
    if setting != "auto":
        return setting
    if has_code_execution:
        return "items"
    return "reasoning" if wants_thinking else "off"


def default_mode_for_responses(setting: StepsSetting, *, shows_items: bool) -> StepsMode:
    """Return the mode for a client of OpenAI's Responses API that did not ask for a mode.

    Only clients that asked for a built-in tool that has items get items. Other clients would take
    an item for a call of their own tools.
    """
    if setting in ("off", "reasoning", "events"):
        return setting
    return "items" if shows_items else "reasoning"


def outcome_line(exit_code: int | None, duration_s: float, output_lines: int | None) -> str:
    """Return the line that ends a step: its exit code, its duration and its number of output
    lines."""
    parts = [] if exit_code is None else [f"exit {exit_code}"]
    parts.append(f"{duration_s:.1f} s")
    if output_lines is not None:
        parts.append(f"{output_lines} {'line' if output_lines == 1 else 'lines'}")
    return f"[{', '.join(parts)}]"


def contains_steps(reasoning: str) -> bool:
    """Return True if reasoning contains steps that the proxy has added."""
    return _OUTCOME_LINE.search(reasoning) is not None


def default_usage_scope(headers: Mapping[str, str]) -> UsageScope:
    """Return the usage scope for a client that did not ask for a scope. The names of `headers` are
    in lower case.

    Coding agents compact a conversation according to the usage, so a sum over several calls would
    make them compact too early.
    """
    is_codex = headers.get(RequestHeader.ORIGINATOR, "").startswith("codex")
    is_opencode = headers.get(RequestHeader.USER_AGENT, "").startswith("opencode/")
    return "last_call" if is_codex or is_opencode else "all_calls"
