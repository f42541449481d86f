"""The limits of one run, the amounts that it has spent, and the plan for its time."""

import math
from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a run ended."""

    SUBMITTED = "submitted"
    """The model called submit."""
    ANSWERED = "answered"
    """The model answered in prose."""
    REFUSED = "refused"
    """The model declined, in the `refusal` field of its message."""
    CLIENT_TOOL_CALLS = "client_tool_calls"
    """The model called tools of the client."""
    MAX_TURNS = "max_turns"
    WALL_TIME = "wall_time"
    DEADLINE = "deadline"
    """The run had to end before the client's announced timeout."""
    TOKEN_BUDGET = "token_budget"
    COST_BUDGET = "cost_budget"
    COMMAND_BUDGET = "command_budget"
    CPU_BUDGET = "cpu_budget"
    EGRESS_BUDGET = "egress_budget"
    TOOL_OUTPUT_BUDGET = "tool_output_budget"
    DAILY_TOKEN_BUDGET = "daily_token_budget"
    """The daily token budget of the API key is exhausted. The other reasons that begin with
    `daily_` are for its other daily budgets."""
    DAILY_COST_BUDGET = "daily_cost_budget"
    DAILY_COMMAND_BUDGET = "daily_command_budget"
    DAILY_CPU_BUDGET = "daily_cpu_budget"
    DAILY_EGRESS_BUDGET = "daily_egress_budget"
    DAILY_TOOL_OUTPUT_BUDGET = "daily_tool_output_budget"
    CONTEXT_WINDOW = "context_window"
    """The model's context window is full, and compaction cannot shorten the messages further."""
    TRAJECTORY_TOKENS = "trajectory_tokens"
    """The trajectory has more tokens than `max_trajectory_tokens`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. A run that reaches a limit ends with its best answer so far."""

    max_turns: int = 100
    """Maximum number of model calls with tools (the paper: 100)."""
    max_run_seconds: float = 1800.0
    """Maximum duration of a run, in seconds."""
    max_total_tokens: int = 2_000_000
    """Maximum number of prompt and completion tokens of all model calls together, as counted by the
    backend."""
    min_turn_tokens: int = 4096
    """Minimum number of tokens that each model call may generate, even if the client's `max_tokens`
    is smaller, because reasoning and tool arguments need them. Visible text is still cut at the
    client's limit."""
    max_cost_usd: float | None = None
    """Maximum cost of all model calls together, in US dollars. If set, models without a known price
    are refused. null: no limit."""
    max_commands: int = 1_000
    """Maximum number of calls of sandbox tools, not counting submit."""
    max_cpu_s: float = 7200.0
    """Maximum processor time of all commands together, in seconds."""
    max_egress_mib: float = 8192.0
    """Maximum network traffic of the run, in both directions together, in MiB."""
    max_tool_output_chars: int = 2_000_000
    """Maximum length of all observations together, in characters."""
    command_timeout_s: float = 120.0
    """Timeout of one command in seconds, unless the model sets another timeout (the paper's
    reference implementation: 120 s). At the timeout, the command is stopped."""
    max_command_timeout_s: float = 3600.0
    """Maximum timeout of one command that the model may set, in seconds."""
    command_wait_s: float = 60.0
    """Seconds after which a command that still runs becomes a background job, so that the model can
    continue."""
    max_trajectory_tokens: int | None = None
    """Maximum number of tokens of the trajectory: the request, the model's turns and the
    observations, each counted once. The backend counts them; messages that it has not counted yet
    are estimated. A run above the limit ends before its next turn (the paper's reference
    implementation: 65,536, and 131,072 for long context). null: no limit."""
    max_choices: int = 16
    """Maximum number of answers to one request (`n`). Each answer is a run with these limits and a
    sandbox of its own. A request for more answers is refused."""
    tell_remaining: bool = True
    """True if the model is told when little is left of a budget."""
    compact: bool = True
    """True if earlier messages are shortened when the model's context window is full; otherwise the
    run ends."""
    final_question: bool = True
    """True if the model is asked for its final answer, without tools, when a run ends at a limit or
    without an answer. Otherwise the answer is the last text of the run, which may be empty."""
    model_timeout_s: float | None = None
    """Maximum time without data from the backend in one model call, in seconds. null:
    `backend.read_timeout_s`."""


@dataclass(frozen=True, slots=True)
class SpentAmounts:
    """The amounts that a run has spent so far."""

    turns: int = 0
    wall_time_s: float = 0.0
    tokens: int = 0
    tool_output_chars: int = 0
    cost_usd: float = 0.0
    commands: int = 0
    cpu_s: float = 0.0
    egress_bytes: int = 0
    next_tokens: int = 0
    """Minimum size of the next prompt in tokens: the size of the last prompt."""
    next_cost_usd: float = 0.0
    """Minimum cost of the next model call."""
    trajectory_tokens: int = 0
    """See `Limits.max_trajectory_tokens`."""


def exceeded_limit(limits: Limits, spent: SpentAmounts) -> StopReason | None:
    """Return the stop reason for the limit that forbids another model call with tools, or None."""
    if spent.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if spent.wall_time_s >= limits.max_run_seconds:
        return StopReason.WALL_TIME
    max_trajectory = limits.max_trajectory_tokens
    if max_trajectory is not None and spent.trajectory_tokens > max_trajectory:
        return StopReason.TRAJECTORY_TOKENS
    return exceeded_spending_limit(limits, spent) or exceeded_command_limit(limits, spent)


def exceeded_spending_limit(limits: Limits, spent: SpentAmounts) -> StopReason | None:
    """Return the stop reason for the limit that forbids any further model call, or None."""
    if _is_limit_reached(spent.tokens, spent.next_tokens, limits.max_total_tokens):
        return StopReason.TOKEN_BUDGET
    if _is_limit_reached(spent.cost_usd, spent.next_cost_usd, limits.max_cost_usd):
        return StopReason.COST_BUDGET
    return None


def exceeded_command_limit(limits: Limits, spent: SpentAmounts) -> StopReason | None:
    """Return the stop reason for the limit that forbids another command, or None."""
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
    return int(mib * (1 << 20))


def _is_limit_reached(spent: float, expected: float, limit: float | None) -> bool:
    return limit is not None and (spent >= limit or spent + expected > limit)


# The plan for a run's time

_MARGIN_SHARE, _MAX_MARGIN_S = 0.05, 10.0
"""The share of the client's timeout that is reserved for collecting artifacts and sending the
answer, and the maximum of this reserve in seconds."""
_WALL_TIME_MARGIN_S = 30.0
"""Minimum time in seconds for collecting artifacts of a run without a deadline."""
_MAX_COLLECTION_S = 120.0
"""Maximum time for collecting artifacts, in seconds."""
_FINAL_CALL_SHARE, _MIN_FINAL_CALL_S, _MAX_FINAL_CALL_S = 0.2, 10.0, 120.0
"""The share of the client's timeout that is reserved for asking the model for its final answer, and
the minimum and maximum of this reserve in seconds. The reserve is at most half of the timeout."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The deadlines of one run, in seconds from its start. They let the run answer before its
    client closes the connection."""

    work_s: float
    """The end of model calls with tools."""
    answer_s: float
    """The end of the model call for the final answer; infinite if the run has no deadline."""
    end_s: float
    """The planned end of the collection of artifacts. The time that `collection_time_s` returns may
    end later."""
    stop_reason: StopReason
    """The stop reason of a run that reaches `work_s`."""

    def collection_time_s(self, spent_s: float) -> float:
        """Return the seconds for collecting artifacts after a run of `spent_s` seconds: the rest of
        the time until `end_s`, but at least the reserved time and at most 120 s."""
        reserved_s = self.end_s - self.answer_s
        if math.isinf(self.answer_s):
            reserved_s = _WALL_TIME_MARGIN_S
        return min(max(self.end_s - spent_s, reserved_s), _MAX_COLLECTION_S)


def time_plan(wall_time_s: float, deadline_s: float | None = None) -> TimePlan:
    """Return the plan for a run whose work is limited to `wall_time_s`. If the client has announced
    a timeout of `deadline_s`, the whole run is planned to end within this time."""
    if deadline_s is None:
        return TimePlan(wall_time_s, math.inf, wall_time_s, StopReason.WALL_TIME)
    answer_s = deadline_s - min(deadline_s * _MARGIN_SHARE, _MAX_MARGIN_S)
    final_call_s = min(max(deadline_s * _FINAL_CALL_SHARE, _MIN_FINAL_CALL_S), _MAX_FINAL_CALL_S)
    work_s = answer_s - min(final_call_s, deadline_s / 2)
    if wall_time_s <= work_s:
        return TimePlan(wall_time_s, answer_s, deadline_s, StopReason.WALL_TIME)
    return TimePlan(work_s, answer_s, deadline_s, StopReason.DEADLINE)
