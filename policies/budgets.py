"""Daily budgets: what one key may spend in a day, whatever each of its runs may. And what the model
is told when little is left of a run's or a day's budgets."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Self

from policies.limits import Limits, Spent, StopReason, mib_to_bytes

DAY_S = 86_400
STOP_REASONS = {
    "tokens": StopReason.DAILY_TOKEN_BUDGET,
    "cost_usd": StopReason.DAILY_COST_BUDGET,
    "commands": StopReason.DAILY_COMMAND_BUDGET,
    "cpu_s": StopReason.DAILY_CPU_BUDGET,
    "egress_bytes": StopReason.DAILY_EGRESS_BUDGET,
    "tool_output_chars": StopReason.DAILY_TOOL_OUTPUT_BUDGET,
}
"""Why a run ends when its key has used up a budget. A budget of `runs` ends no run: it refuses the
next one."""
BUDGET_LABELS = {
    "runs": "requests",
    "tokens": "tokens",
    "cost_usd": "cost",
    "commands": "tool calls",
    "cpu_s": "processor time",
    "egress_bytes": "network traffic",
    "tool_output_chars": "tool output",
}
"""The kinds of expense, in words for clients."""


@dataclass(frozen=True, slots=True)
class DailyBudget:
    """What one key may spend from midnight to midnight, UTC. null: no limit."""

    runs: int | None = None
    """Requests that the loop answers, each further choice (`n`) one more."""
    tokens: int | None = None
    """Prompt and completion tokens, of requests that are passed on too."""
    cost_usd: float | None = None
    """Of the same; a model without a known price is then refused."""
    commands: int | None = None
    """Calls of our tools, submit aside."""
    cpu_s: float | None = None
    egress_mib: float | None = None
    tool_output_chars: int | None = None

    @property
    def is_set(self) -> bool:
        """True if there is any limit, so that expenses must be counted."""
        return self != _NOTHING

    @property
    def for_model_calls(self) -> "DailyBudget":
        """The part of the budget that holds for a request without a sandbox."""
        if not self.is_set:  # as for most keys, and each plain request asks for it
            return self
        return DailyBudget(tokens=self.tokens, cost_usd=self.cost_usd)


_NOTHING = DailyBudget()


@dataclass(frozen=True, slots=True)
class Expense:
    """An amount of each kind that was spent or is about to be."""

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
    """A reservation in a day's budget, until the actual expense is known."""

    day: int
    expected: Expense
    spent: Expense
    """By that key on that day, this reservation included."""
    exhausted: str | None = None
    """The kind of which nothing is left, if any; then nothing was reserved."""


def exhausted(budget: DailyBudget, spent: Expense, wanted: Expense) -> str | None:
    """Return the first kind of which nothing is left for another expense, or None."""
    if wanted.runs and budget.runs is not None and spent.runs + wanted.runs > budget.runs:
        return "runs"
    for kind, most in limits_by_kind(budget).items():
        if kind == "runs" or most is None or (kind == "egress_bytes" and not spent.egress_bytes):
            continue  # egress_mib: 0 forbids traffic, not work
        if getattr(spent, kind) >= most:
            return kind
    return None


def limits_by_kind(budget: DailyBudget) -> dict[str, float | None]:
    """Return the limits by kind of expense; None is no limit."""
    mib = budget.egress_mib
    egress = None if mib is None else mib_to_bytes(mib)
    amounts = (
        *(budget.runs, budget.tokens, budget.cost_usd, budget.commands),
        *(budget.cpu_s, egress, budget.tool_output_chars),
    )
    return dict(zip(EXPENSE_KINDS, amounts, strict=True))


def day_number(now: float) -> int:
    """Return the day of a moment, counted from 1970, UTC."""
    return int(now // DAY_S)


def seconds_until_midnight(now: float) -> float:
    """Return the seconds until the next day begins, UTC."""
    return DAY_S - now % DAY_S


# What the model is told

_LITTLE, _VERY_LITTLE = 0.2, 0.05
"""Shares of a budget: at each of them the model is told once."""
_LAST_STEPS, _LAST_S = 3, 60.0
"""So few steps and seconds are very little; of seconds, at most `_LITTLE` of the wall time is."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LowBudgetHint:
    """The little that is left of one budget."""

    text: str
    level: int
    """1: little; 2: very little."""


def low_budget_hints(limits: Limits, spent: Spent) -> dict[str, LowBudgetHint]:
    """Return what is left of those of a run's own budgets of which little is left, by kind."""
    last_s = min(_LAST_S, limits.wall_time_s * _LITTLE)
    rows = (
        ("turns", limits.max_turns, spent.turns, _LAST_STEPS),
        ("wall_time_s", limits.wall_time_s, spent.wall_time_s, last_s),
        ("tokens", limits.max_tokens, spent.tokens, 0),
        ("cost_usd", limits.max_cost_usd, spent.cost_usd, 0),
        ("commands", limits.max_commands, spent.commands, 0),
        ("cpu_s", limits.max_cpu_s, spent.cpu_s, 0),
        ("egress_bytes", mib_to_bytes(limits.max_egress_mib), spent.egress_bytes, 0),
        ("tool_output_chars", limits.max_tool_output_chars, spent.tool_output_chars, 0),
    )
    found = ((kind, _hint(kind, most, used, last)) for kind, most, used, last in rows)
    return {kind: left for kind, left in found if left}


def low_daily_budget_hints(budget: DailyBudget, spent: Expense) -> dict[str, LowBudgetHint]:
    """Return the same for the daily budgets of a run's key."""
    found: dict[str, LowBudgetHint] = {}
    for kind, most in limits_by_kind(budget).items():
        left = None if kind == "runs" else _hint(kind, most, getattr(spent, kind), 0)
        if left:
            found[f"today's {kind}"] = LowBudgetHint(f"{left.text} of today's budget", left.level)
    return found


def reminder(left: Mapping[str, LowBudgetHint], told: Mapping[str, int]) -> str:
    """Return a line for the model, or "" if it was told everything before; `told` are the levels
    that it was told, by kind."""
    if all(each.level <= told.get(kind, 0) for kind, each in left.items()):
        return ""
    *words, last = (each.text for each in left.values())
    joined = f"{', '.join(words)} and {last}" if words else last
    verb = "remains" if len(left) == 1 and last.startswith("1 ") else "remain"
    hurry = " Hand in what you have." if any(each.level == 2 for each in left.values()) else ""
    return f"[{joined} {verb}.{hurry}]"


def _hint(kind: str, most: float | None, used: float, last: float) -> LowBudgetHint | None:
    if not most:
        return None
    left = max(0.0, most - used)
    if left <= max(last, most * _VERY_LITTLE):
        return LowBudgetHint(_remaining_text(kind, left), 2)
    if left <= most * _LITTLE:
        return LowBudgetHint(_remaining_text(kind, left), 1)
    return None


def _remaining_text(kind: str, left: float) -> str:
    match kind:
        case "turns":
            return _count(left, "step")
        case "wall_time_s":
            return _time(left)
        case "cpu_s":
            return f"{_time(left)} of processor time"
        case "cost_usd":
            return f"{left:.2g} USD for model calls"
        case "commands":
            return _count(left, "tool call")
        case "egress_bytes":
            return f"{left / _MIB:.3g} MiB of network traffic"
        case "tool_output_chars":
            return f"{_count(left, 'character')} of tool output"
    return _count(left, "token")


def _count(left: float, noun: str) -> str:
    return f"{left:,.0f} {noun}{'' if left == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 2 * 60 else f"{seconds:.0f} s"
