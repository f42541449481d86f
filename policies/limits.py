"""How long one run may go on: its limits, what it has spent of them, and its plan for the time."""

import math
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
    COST_BUDGET = "cost_budget"
    COMMAND_BUDGET = "command_budget"
    CPU_BUDGET = "cpu_budget"
    EGRESS_BUDGET = "egress_budget"
    TOOL_OUTPUT_BUDGET = "tool_output_budget"
    DAILY_TOKEN_BUDGET = "daily_token_budget"
    """A key's budget for the day is used up, as with those below."""
    DAILY_COST_BUDGET = "daily_cost_budget"
    DAILY_COMMAND_BUDGET = "daily_command_budget"
    DAILY_CPU_BUDGET = "daily_cpu_budget"
    DAILY_EGRESS_BUDGET = "daily_egress_budget"
    DAILY_TOOL_OUTPUT_BUDGET = "daily_tool_output_budget"
    CONTEXT_WINDOW = "context_window"
    """The backend's context is full and nothing is left to shorten."""
    TRAJECTORY_TOKENS = "trajectory_tokens"
    """The trajectory has more than `max_trajectory_tokens`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may spend. A run that reaches a limit ends with the best answer it has."""

    max_turns: int = 100
    """Model calls with tools (the paper's 100)."""
    wall_time_s: float = 1800.0
    max_tokens: int = 2_000_000
    """Prompt and completion tokens of all model calls together, as the backend counts them."""
    min_turn_tokens: int = 4096
    """What a model call may generate at least, however small the client's `max_tokens`: thinking
    and a call's arguments need room. Visible prose is cut at the client's own limit."""
    max_cost_usd: float | None = None
    """US dollars for all model calls together; a model without a known price is then refused."""
    max_commands: int = 1_000
    """Calls of our tools, submit aside."""
    max_cpu_s: float = 7200.0
    """Processor time of all commands together."""
    max_egress_mib: float = 8192.0
    """What passes between sandbox and world, both ways together; `egress.max_mib` holds beside it
    for a sandbox that several runs use."""
    max_tool_output_chars: int = 2_000_000
    """Characters of all observations together: they are what the model reads, bytes are not."""
    command_timeout_s: float = 120.0
    """Time for one command, unless the model asks for another (the reference's 120 s)."""
    max_command_timeout_s: float = 3600.0
    """The longest time the model may ask for."""
    command_wait_s: float = 60.0
    """After so long a command that still runs goes on as a job, and the model is told."""
    max_trajectory_tokens: int | None = None
    """Tokens of the trajectory, each counted once however often it is sent: the request, the
    model's turns and the observations, as the backend counts them, and an estimate of what it has
    not counted yet. A run whose trajectory has more before a turn ends (the reference: 65,536, and
    131,072 for long context). null: no limit."""
    max_choices: int = 16
    """Answers one request may ask for (`n`), each a run with these limits and its own sandbox."""
    tell_remaining: bool = True
    """Whether the model is told what remains when that is little."""
    compact: bool = True
    """Whether the history is shortened when it fills the model's context. false: the run ends."""
    final_question: bool = True
    """Whether the model is asked for its answer, without tools, when a run ends without one or at a
    limit. false: the answer is what the run has left, which may be nothing."""
    model_timeout_s: float | None = None
    """Longest silence of the backend in one model call; null: `backend.timeout_s`."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has used so far."""

    turns: int = 0
    wall_time_s: float = 0.0
    tokens: int = 0
    tool_output_chars: int = 0
    cost_usd: float = 0.0
    commands: int = 0
    cpu_s: float = 0.0
    egress_bytes: int = 0
    next_tokens: int = 0
    """What the next prompt has at least: what the last one had."""
    next_cost_usd: float = 0.0
    """What that costs at least."""
    trajectory_tokens: int = 0
    """See `Limits.max_trajectory_tokens`."""


def exceeded(limits: Limits, spent: Spent) -> StopReason | None:
    """Return the first limit that leaves no room for another model call with tools, or None."""
    if spent.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if spent.wall_time_s >= limits.wall_time_s:
        return StopReason.WALL_TIME
    most = limits.max_trajectory_tokens
    if most is not None and spent.trajectory_tokens > most:
        return StopReason.TRAJECTORY_TOKENS
    return exceeded_spending(limits, spent) or exceeded_command_limit(limits, spent)


def exceeded_spending(limits: Limits, spent: Spent) -> StopReason | None:
    """Return the first limit that leaves no room for the cost of another model call, or None."""
    if _is_full(spent.tokens, spent.next_tokens, limits.max_tokens):
        return StopReason.TOKEN_BUDGET
    if _is_full(spent.cost_usd, spent.next_cost_usd, limits.max_cost_usd):
        return StopReason.COST_BUDGET
    return None


def exceeded_command_limit(limits: Limits, spent: Spent) -> StopReason | None:
    """Return the first limit that leaves no room for another command, or None."""
    if spent.commands >= limits.max_commands:
        return StopReason.COMMAND_BUDGET
    if spent.cpu_s >= limits.max_cpu_s:
        return StopReason.CPU_BUDGET
    if spent.egress_bytes and spent.egress_bytes >= mib_to_bytes(limits.max_egress_mib):
        return StopReason.EGRESS_BUDGET
    if spent.tool_output_chars >= limits.max_tool_output_chars:
        return StopReason.TOOL_OUTPUT_BUDGET
    return None


def mib_to_bytes(mib: float) -> int:
    """Return MiB as bytes."""
    return int(mib * (1 << 20))


def _is_full(spent: float, coming: float, most: float | None) -> bool:
    return most is not None and (spent >= most or spent + coming > most)


# The plan for a run's time

_MARGIN, _MAX_MARGIN_S = 0.05, 10.0
"""The share of a deadline that is kept for collecting files and for the way back to the client."""
_WALL_TIME_MARGIN_S = 30.0
"""The same for a run without a deadline, once its wall time is up."""
_MAX_HAND_BACK_S = 120.0
"""Collecting files never takes longer, however much time is left."""
_LAST_WORDS, _MIN_LAST_WORDS_S, _MAX_LAST_WORDS_S = 0.2, 10.0, 120.0
"""The share of a deadline that is kept for asking the model for its answer; at most half."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """How one run may spend its time, in seconds from its start, so that its answer is there before
    its client hangs up."""

    work_s: float
    """Until then the model has its tools."""
    answer_s: float
    """Until then it may be asked for its answer."""
    end_s: float
    """Until then the produced files must be collected."""
    stop: StopReason
    """What ends the work."""

    def collection_time_s(self, spent_s: float) -> float:
        """Return the seconds that collecting files may take once the run has taken `spent_s`: what
        is left of its time, but never less than is kept for it."""
        kept_s = _WALL_TIME_MARGIN_S if math.isinf(self.answer_s) else self.end_s - self.answer_s
        return min(max(self.end_s - spent_s, kept_s), _MAX_HAND_BACK_S)


def time_plan(wall_time_s: float, deadline_s: float | None = None) -> TimePlan:
    """Return the plan for a run whose policy bounds the work by `wall_time_s`, and whose client
    waits `deadline_s` for everything, if it said so."""
    if deadline_s is None:
        return TimePlan(wall_time_s, math.inf, wall_time_s, StopReason.WALL_TIME)
    answer_s = deadline_s - min(deadline_s * _MARGIN, _MAX_MARGIN_S)
    last_words_s = min(max(deadline_s * _LAST_WORDS, _MIN_LAST_WORDS_S), _MAX_LAST_WORDS_S)
    work_s = answer_s - min(last_words_s, deadline_s / 2)
    if wall_time_s <= work_s:
        return TimePlan(wall_time_s, answer_s, deadline_s, StopReason.WALL_TIME)
    return TimePlan(work_s, answer_s, deadline_s, StopReason.DEADLINE)
