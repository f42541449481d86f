"""What the model is told of its budgets when little is left of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from policies.budgets import DailyBudget, Expense, most_of
from policies.limits import Limits, Spent, egress_bytes

LITTLE, VERY_LITTLE = 0.2, 0.05
"""Shares of a budget: at each of them the model is told once."""
LAST_STEPS, LAST_S = 3, 60.0
"""So few steps and seconds are very little, but of seconds never more than little of all."""
GO_ON, HAND_IN = "", " Hand in what you have."
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of one budget, where that is little."""

    words: str
    level: int
    """1: little; 2: very little."""


def little_left(limits: Limits, spent: Spent) -> dict[str, Left]:
    """Of a run's own budgets."""
    last_s = min(LAST_S, limits.wall_time_s * LITTLE)
    rows = (
        ("turns", limits.max_turns, spent.turns, LAST_STEPS),
        ("wall_time_s", limits.wall_time_s, spent.wall_time_s, last_s),
        ("tokens", limits.max_tokens, spent.tokens, 0),
        ("cost_usd", limits.max_cost_usd, spent.cost_usd, 0),
        ("commands", limits.max_commands, spent.commands, 0),
        ("cpu_s", limits.max_cpu_s, spent.cpu_s, 0),
        ("egress_bytes", egress_bytes(limits.max_egress_mib), spent.egress_bytes, 0),
        ("tool_output_chars", limits.max_tool_output_chars, spent.tool_output_chars, 0),
    )
    found = ((kind, _left(kind, most, used, last)) for kind, most, used, last in rows)
    return {kind: left for kind, left in found if left}


def little_left_today(budget: DailyBudget, spent: Expense) -> dict[str, Left]:
    """Of its key's."""
    found: dict[str, Left] = {}
    for kind, most in most_of(budget).items():
        left = None if kind == "runs" else _left(kind, most, getattr(spent, kind), 0)
        if left:
            found[f"today's {kind}"] = Left(f"{left.words} of today's budget", left.level)
    return found


def reminder(left: Mapping[str, Left], told: Mapping[str, int]) -> str:
    """One line, or "" where there is nothing that was not told before."""
    if all(each.level <= told.get(kind, 0) for kind, each in left.items()):
        return ""
    words = list(_joined([each.words for each in left.values()]))
    verb = "remains" if len(left) == 1 and words[0].startswith("1 ") else "remain"
    hurry = HAND_IN if any(each.level == 2 for each in left.values()) else GO_ON
    return f"[{''.join(words)} {verb}.{hurry}]"


def _left(kind: str, most: float | None, used: float, last: float) -> Left | None:
    if not most:
        return None
    left = max(0.0, most - used)
    if left <= max(last, most * VERY_LITTLE):
        return Left(_words(kind, left), 2)
    if left <= most * LITTLE:
        return Left(_words(kind, left), 1)
    return None


def _words(kind: str, left: float) -> str:
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


def _joined(parts: list[str]) -> Iterator[str]:
    for index, part in enumerate(parts):
        yield part
        if index < len(parts) - 1:
            yield " and " if index == len(parts) - 2 else ", "
