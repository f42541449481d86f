"""Daily budgets of an API key, and the hints that tell the model that a budget of its run or of the
day is nearly exhausted."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Self

from policies.limits import Limits, SpentAmounts, StopReason, mib_to_bytes

DAY_S = 86_400
STOP_REASONS = {
    "tokens": StopReason.DAILY_TOKEN_BUDGET,
    "cost_usd": StopReason.DAILY_COST_BUDGET,
    "commands": StopReason.DAILY_COMMAND_BUDGET,
    "cpu_s": StopReason.DAILY_CPU_BUDGET,
    "egress_bytes": StopReason.DAILY_EGRESS_BUDGET,
    "tool_output_chars": StopReason.DAILY_TOOL_OUTPUT_BUDGET,
}
"""The stop reason of a run whose key has exhausted a daily budget, by kind of expense. An exhausted
budget of `runs` does not stop runs; the key's next request is refused."""
BUDGET_LABELS = {
    "runs": "runs",
    "tokens": "tokens",
    "cost_usd": "cost",
    "commands": "tool calls",
    "cpu_s": "processor time",
    "egress_bytes": "network traffic",
    "tool_output_chars": "tool output",
}
"""Names of the kinds of expense in error messages for clients."""


@dataclass(frozen=True, slots=True)
class DailyBudget:
    """Budgets of one API key from midnight to midnight, UTC. null: no limit."""

    runs: int | None = None
    """Maximum number of runs. Each further choice (`n`) of a request is a run of its own."""
    tokens: int | None = None
    """Maximum number of prompt and completion tokens, including tokens of requests without a
    sandbox."""
    cost_usd: float | None = None
    """Maximum cost of model calls, in US dollars, including calls without a sandbox. If set, models
    without a known price are refused."""
    commands: int | None = None
    """Maximum number of calls of sandbox tools, not counting submit."""
    cpu_s: float | None = None
    """Maximum processor time of commands, in seconds."""
    egress_mib: float | None = None
    """Maximum network traffic of sandboxes, in both directions together, in MiB."""
    tool_output_chars: int | None = None
    """Maximum length of all observations together, in characters."""

    @property
    def is_set(self) -> bool:
        """True if any budget has a limit. Otherwise expenses need not be counted."""
        return self != _UNLIMITED

    @property
    def for_model_calls(self) -> "DailyBudget":
        """The part of the budget that applies to a request without a sandbox."""
        if not self.is_set:  # the usual case, on the path of every plain request
            return self
        return DailyBudget(tokens=self.tokens, cost_usd=self.cost_usd)


_UNLIMITED = DailyBudget()


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of one key, for all of its runs together."""

    daily: DailyBudget = DailyBudget()


@dataclass(frozen=True, slots=True)
class Expense:
    """The amounts that were spent or will be spent, one for each kind of expense."""

    runs: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    commands: int = 0
    cpu_s: float = 0.0
    egress_bytes: int = 0
    tool_output_chars: int = 0

    def __add__(self, more: Self) -> "Expense":
        return Expense(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __sub__(self, less: Self) -> "Expense":
        return Expense(*(a - b for a, b in zip(astuple(self), astuple(less), strict=True)))


EXPENSE_KINDS = tuple(field.name for field in fields(Expense))


@dataclass(frozen=True, slots=True)
class Reservation:
    """An expected expense that is reserved in a daily budget until the actual expense is known."""

    day: int
    expected: Expense
    spent: Expense
    """Everything that the key has spent or reserved on that day, including this reservation."""
    exhausted_kind: str | None = None
    """The kind of expense whose budget is exhausted, or None. If a kind is set, nothing was
    reserved."""


def exhausted_kind(budget: DailyBudget, spent: Expense, wanted: Expense) -> str | None:
    """Return the first kind of expense whose budget is exhausted, or None.

    The budget of `runs` must have room for the wanted runs. Any other budget is exhausted only once
    its limit is reached, so the last expense may exceed it.
    """
    if wanted.runs and budget.runs is not None and spent.runs + wanted.runs > budget.runs:
        return "runs"
    for kind, most in limits_by_kind(budget).items():
        if kind == "runs" or most is None or (kind == "egress_bytes" and not spent.egress_bytes):
            continue  # egress_mib: 0 forbids traffic, not runs
        if getattr(spent, kind) >= most:
            return kind
    return None


def limits_by_kind(budget: DailyBudget) -> dict[str, float | None]:
    """Return the limit of each kind of expense, for egress in bytes; None means no limit."""
    mib = budget.egress_mib
    egress = None if mib is None else mib_to_bytes(mib)
    amounts = (
        budget.runs,
        budget.tokens,
        budget.cost_usd,
        budget.commands,
        budget.cpu_s,
        egress,
        budget.tool_output_chars,
    )
    return dict(zip(EXPENSE_KINDS, amounts, strict=True))


def day_number(now: float) -> int:
    """Return the number of days from 1970-01-01 to a time in seconds since 1970, UTC."""
    return int(now // DAY_S)


def seconds_until_midnight(now: float) -> float:
    """Return the seconds until the next midnight, UTC."""
    return DAY_S - now % DAY_S


# Hints for the model

_LITTLE_SHARE, _VERY_LITTLE_SHARE = 0.2, 0.05
"""Shares of a budget below which the model gets a hint: at most one hint for each share."""
_LAST_TURNS, _LAST_S = 3, 60.0
"""Remaining turns and seconds that count as very little, whatever their share of the limit. In a
short run, `_LITTLE_SHARE` of the run's maximum time replaces `_LAST_S`."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LowBudgetHint:
    """A hint for the model that little is left of a budget."""

    text: str
    level: int
    """1: little; 2: very little."""


def low_budget_hints(limits: Limits, spent: SpentAmounts) -> dict[str, LowBudgetHint]:
    """Return a hint for each of the run's own budgets that is nearly exhausted, by kind, such as
    `turns`."""
    last_s = min(_LAST_S, limits.max_run_seconds * _LITTLE_SHARE)
    rows = (
        ("turns", limits.max_turns, spent.turns, _LAST_TURNS),
        ("wall_time_s", limits.max_run_seconds, spent.wall_time_s, last_s),
        ("tokens", limits.max_total_tokens, spent.tokens, 0),
        ("cost_usd", limits.max_cost_usd, spent.cost_usd, 0),
        ("commands", limits.max_commands, spent.commands, 0),
        ("cpu_s", limits.max_cpu_s, spent.cpu_s, 0),
        ("egress_bytes", mib_to_bytes(limits.max_egress_mib), spent.egress_bytes, 0),
        ("tool_output_chars", limits.max_tool_output_chars, spent.tool_output_chars, 0),
    )
    hints: dict[str, LowBudgetHint] = {}
    for kind, limit, used, last in rows:
        if hint := _low_budget_hint(kind, limit, used, last):
            hints[kind] = hint
    return hints


def low_daily_budget_hints(budget: DailyBudget, spent: Expense) -> dict[str, LowBudgetHint]:
    """Return a hint for each daily budget except `runs` that is nearly exhausted, by kind with the
    prefix `today's`."""
    hints: dict[str, LowBudgetHint] = {}
    for kind, limit in limits_by_kind(budget).items():
        hint = None if kind == "runs" else _low_budget_hint(kind, limit, getattr(spent, kind), 0)
        if hint:
            hints[f"today's {kind}"] = LowBudgetHint(f"{hint.text} of today's budget", hint.level)
    return hints


def reminder(hints: Mapping[str, LowBudgetHint], shown_levels: Mapping[str, int]) -> str:
    """Return a line for the model that lists the hints, or "" if the model has been shown all of
    them.

    `shown_levels` are the levels of the hints that the model has been shown, by kind.
    """
    if all(hint.level <= shown_levels.get(kind, 0) for kind, hint in hints.items()):
        return ""
    *texts, last = (hint.text for hint in hints.values())
    joined = f"{', '.join(texts)} and {last}" if texts else last
    verb = "remains" if len(hints) == 1 and last.startswith("1 ") else "remain"
    hurry = " Hand in what you have." if any(hint.level == 2 for hint in hints.values()) else ""
    return f"[{joined} {verb}.{hurry}]"


def _low_budget_hint(
    kind: str, limit: float | None, used: float, very_little: float
) -> LowBudgetHint | None:
    if not limit:
        return None
    left = limit - used
    if left > very_little and left > limit * _LITTLE_SHARE:
        return None
    is_very_little = left <= very_little or left <= limit * _VERY_LITTLE_SHARE
    return LowBudgetHint(_remaining_text(kind, max(0.0, left)), 2 if is_very_little else 1)


def _remaining_text(kind: str, left: float) -> str:
    match kind:
        case "turns":
            return _count_text(left, "step")
        case "wall_time_s":
            return _time_text(left)
        case "cpu_s":
            return f"{_time_text(left)} of processor time"
        case "cost_usd":
            return f"{left:.2g} USD for model calls"
        case "commands":
            return _count_text(left, "tool call")
        case "egress_bytes":
            return f"{left / _MIB:.3g} MiB of network traffic"
        case "tool_output_chars":
            return f"{_count_text(left, 'character')} of tool output"
    return _count_text(left, "token")


def _count_text(left: float, noun: str) -> str:
    return f"{left:,.0f} {noun}{'' if left == 1 else 's'}"


def _time_text(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 2 * 60 else f"{seconds:.0f} s"
