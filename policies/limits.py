"""How long one run may go on."""

from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Why a run ended."""

    SUBMITTED = "submitted"
    """The model called submit."""
    ANSWERED = "answered"
    """The model answered in prose."""
    REFUSED = "refused"
    """The model declined, in the field that is for it."""
    CLIENT_TOOL_CALLS = "client_tool_calls"
    """The model called tools that only the client can run."""
    MAX_TURNS = "max_turns"
    WALL_TIME = "wall_time"
    DEADLINE = "deadline"
    """The client would have hung up."""
    TOKEN_BUDGET = "token_budget"
    TOOL_OUTPUT_BUDGET = "tool_output_budget"
    CONTEXT_WINDOW = "context_window"
    """The backend's context is full and nothing is left to shorten."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may spend. Reaching one ends the run in the best answer it has."""

    max_turns: int = 100
    """Model calls with tools (the paper's 100)."""
    wall_time_s: float = 1800.0
    max_tokens: int = 2_000_000
    """Prompt and completion tokens of all model calls together, as the backend counts them."""
    max_tool_output_chars: int = 2_000_000
    """Characters of all observations together."""
    command_timeout_s: float = 120.0
    """Time for one command, unless the model asks for another (the reference's 120 s)."""
    max_command_timeout_s: float = 3600.0
    """The longest time the model may ask for."""
    command_wait_s: float = 60.0
    """After so long a command that still runs goes on as a job, and the model is told."""
    max_choices: int = 16
    """Answers one request may ask for (`n`), each a run with these limits and its own sandbox."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has used so far."""

    turns: int = 0
    wall_time_s: float = 0.0
    tokens: int = 0
    tool_output_chars: int = 0


def exceeded(limits: Limits, spent: Spent) -> StopReason | None:
    """The first limit that leaves no room for another model call with tools."""
    if spent.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if spent.wall_time_s >= limits.wall_time_s:
        return StopReason.WALL_TIME
    if spent.tokens >= limits.max_tokens:
        return StopReason.TOKEN_BUDGET
    if spent.tool_output_chars >= limits.max_tool_output_chars:
        return StopReason.TOOL_OUTPUT_BUDGET
    return None
