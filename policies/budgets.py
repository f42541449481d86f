"""What one key may spend in a day, whatever each of its runs may."""

from dataclasses import astuple, dataclass, fields
from typing import Self

from policies.limits import StopReason, egress_bytes

DAY_S = 86_400
STOPS = {
    "tokens": StopReason.DAILY_TOKEN_BUDGET,
    "cost_usd": StopReason.DAILY_COST_BUDGET,
    "commands": StopReason.DAILY_COMMAND_BUDGET,
    "cpu_s": StopReason.DAILY_CPU_BUDGET,
    "egress_bytes": StopReason.DAILY_EGRESS_BUDGET,
    "tool_output_chars": StopReason.DAILY_TOOL_OUTPUT_BUDGET,
}
"""How a run ends whose key has used up one of its budgets. One of `runs` bounds beginnings."""
NAMES = {
    "runs": "requests",
    "tokens": "tokens",
    "cost_usd": "cost",
    "commands": "tool calls",
    "cpu_s": "processor time",
    "egress_bytes": "network traffic",
    "tool_output_chars": "tool output",
}
"""As clients are told of them."""


@dataclass(frozen=True, slots=True)
class DailyBudget:
    """From midnight to midnight, UTC. null: as much as it likes."""

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
        """Whether there is anything to count."""
        return self != _NOTHING

    @property
    def of_model_calls(self) -> "DailyBudget":
        """What of it bounds a request without a sandbox."""
        if not self.is_set:  # as for most, and this is asked of each plain request
            return self
        return DailyBudget(tokens=self.tokens, cost_usd=self.cost_usd)


_NOTHING = DailyBudget()


@dataclass(frozen=True, slots=True)
class Expense:
    """What was spent, or is about to be."""

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


KINDS = tuple(field.name for field in fields(Expense))


@dataclass(frozen=True, slots=True)
class Receipt:
    """Something that was taken out of a day's budget, until it is known what it came to."""

    day: int
    expected: Expense
    spent: Expense
    """By that key on that day, this included."""
    used_up: str | None = None
    """The kind of which nothing is left, if so; then nothing was taken."""


def used_up(budget: DailyBudget, spent: Expense, wanted: Expense) -> str | None:
    """The first kind of which there is nothing left for another expense."""
    if wanted.runs and budget.runs is not None and spent.runs + wanted.runs > budget.runs:
        return "runs"
    for kind, most in most_of(budget).items():
        if kind == "runs" or most is None or (kind == "egress_bytes" and not spent.egress_bytes):
            continue  # who may send nothing may still work
        if getattr(spent, kind) >= most:
            return kind
    return None


def most_of(budget: DailyBudget) -> dict[str, float | None]:
    """The bounds, by kind of expense."""
    mib = budget.egress_mib
    egress = None if mib is None else egress_bytes(mib)
    amounts = (
        *(budget.runs, budget.tokens, budget.cost_usd, budget.commands),
        *(budget.cpu_s, egress, budget.tool_output_chars),
    )
    return dict(zip(KINDS, amounts, strict=True))


def day_of(now: float) -> int:
    """The day of a moment, counted from 1970, UTC."""
    return int(now // DAY_S)


def until_midnight_s(now: float) -> float:
    """How long the day still lasts."""
    return DAY_S - now % DAY_S
