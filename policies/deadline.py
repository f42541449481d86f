"""When a run must stop working, so that its answer is there before its client hangs up."""

import math
from dataclasses import dataclass

from policies.limits import StopReason

MARGIN, MAX_MARGIN_S = 0.05, 10.0
"""The part of the time that is left for handing files over and for the way back."""
WALL_TIME_MARGIN_S = 30.0
"""The same of a run without a deadline, once its wall time is up."""
MAX_HAND_BACK_S = 120.0
"""Handing files back never takes longer, however much time is left."""
LAST_WORDS, MIN_LAST_WORDS_S, MAX_LAST_WORDS_S = 0.2, 10.0, 120.0
"""The part of it that is kept for asking the model for what it has; never more than half."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """How one run may spend its time, in seconds from its start."""

    work_s: float
    """Until then the model has its tools."""
    answer_s: float
    """Until then its last words must be there."""
    end_s: float
    """Until then the files must be handed back."""
    stop: StopReason
    """What ends the work."""

    def hand_back_s(self, spent_s: float) -> float:
        """Return the seconds that handing files back may take once the run has taken `spent_s`:
        what is left of its time, but never less than is kept for it."""
        kept_s = WALL_TIME_MARGIN_S if math.isinf(self.answer_s) else self.end_s - self.answer_s
        return min(max(self.end_s - spent_s, kept_s), MAX_HAND_BACK_S)


def time_plan(wall_time_s: float, deadline_s: float | None = None) -> TimePlan:
    """`wall_time_s` bounds the work, as the policy has it; `deadline_s` the whole, as the client
    has it."""
    if deadline_s is None:
        return TimePlan(wall_time_s, math.inf, wall_time_s, StopReason.WALL_TIME)
    answer_s = deadline_s - min(deadline_s * MARGIN, MAX_MARGIN_S)
    last_words_s = min(max(deadline_s * LAST_WORDS, MIN_LAST_WORDS_S), MAX_LAST_WORDS_S)
    work_s = answer_s - min(last_words_s, deadline_s / 2)
    if wall_time_s <= work_s:
        return TimePlan(wall_time_s, answer_s, deadline_s, StopReason.WALL_TIME)
    return TimePlan(work_s, answer_s, deadline_s, StopReason.DEADLINE)
