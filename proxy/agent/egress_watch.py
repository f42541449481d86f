"""What programs in a run's sandbox reached, or tried to: an event each, and a line in the log.

Connections that come to nothing cost a program next to nothing: after a few in a period they are
counted, and the others told in one.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from policies.hosts import Target
from policies.throttle import Throttle
from proxy.agent.events import EgressDecided, Emit, Event, RuleMet
from proxy.agent.guard import Guard
from proxy.agent.task import Task
from sandbox_runtime.egress.decision import Decision

log = logging.getLogger(__name__)
STILL_OPEN = "still open when the run ended"
MAX_TOLD, PERIOD_S = 50, 60.0
"""How many connections that came to nothing are told in a period, and how many times a rule is."""


class EgressWatch:
    """Listens to the decisions on one run's connections."""

    def __init__(self, task: Task, emit: Emit, now: Callable[[], float] = time.monotonic) -> None:
        self._run_id = task.run_id
        self._guard = Guard(task.profile, self._met)
        self._emit: Emit | None = emit
        self._now = now
        self._open = Counter[Target]()
        self._failed = Throttle(MAX_TOLD, PERIOD_S)
        self._rules: dict[str, tuple[Throttle, RuleMet]] = {}
        """By their names, each with what was last told of it."""

    async def asked(self, target: Target) -> str | None:
        """Why a connection is not to be, which the sandbox's own rules allow."""
        refused = await self._guard.egress_refusal(target)
        if refused is None and self._emit is not None:
            self._open[target] += 1
        return refused

    async def decided(self, decision: Decision) -> None:
        """A connection is over, or was not to be."""
        target = Target(decision.host, decision.port)
        if self._open[target] > 1:
            self._open[target] -= 1
        else:
            self._open.pop(target, None)
        if _came_to_nothing(decision):
            await self._tell_failed(self._failed.start_period(self._now()))
            if not self._failed.allows():
                return
        await self._tell_decision(decision)

    async def tell_open(self) -> None:
        """Tell of the connections that outlive the run, and what was only counted so far."""
        await self._tell_failed(self._failed.take_held_back())
        for throttle, met in self._rules.values():
            await self._tell_met(met, throttle.take_held_back())
        for target in list(self._open.elements()):
            decision = Decision(target.host, target.port, "allowed", STILL_OPEN, 0, 0, 0.0)
            await self._tell(EgressDecided(decision))

    def close(self) -> None:
        """Nobody listens to the run any more; what is still to come goes to the log alone."""
        self._emit = None
        self._open.clear()
        if more := self._failed.take_held_back():
            self._log(_summary(more))

    async def _met(self, event: Event) -> None:
        """A connection has met a rule."""
        assert isinstance(event, RuleMet)
        throttle, _ = self._rules.get(event.rule) or (Throttle(MAX_TOLD, PERIOD_S), event)
        self._rules[event.rule] = (throttle, event)
        await self._tell_met(event, throttle.start_period(self._now()))
        if throttle.allows():
            await self._tell(event)

    async def _tell_met(self, event: RuleMet, more: int) -> None:
        if more:
            await self._tell(replace(event, subject=f"and {more} more"))

    async def _tell_failed(self, more: int) -> None:
        if more:
            await self._tell_decision(_summary(more))

    async def _tell_decision(self, decision: Decision) -> None:
        self._log(decision)
        await self._tell(EgressDecided(decision))

    def _log(self, decision: Decision) -> None:
        log.info(
            "run %s egress %s %s:%d, %d bytes up, %d down %s",
            self._run_id,
            decision.verdict,
            decision.host or "?",
            decision.port,
            decision.bytes_up,
            decision.bytes_down,
            decision.reason,
        )

    async def _tell(self, event: Event) -> None:
        if self._emit is not None:
            await self._emit(event)


def _came_to_nothing(decision: Decision) -> bool:
    is_empty = not decision.bytes_up and not decision.bytes_down
    return decision.verdict == "denied" or bool(decision.reason and is_empty)


def _summary(more: int) -> Decision:
    """What stands for connections that are not told one by one."""
    return Decision("", 0, "denied", f"and {more} more connections that failed", 0, 0, 0.0)
