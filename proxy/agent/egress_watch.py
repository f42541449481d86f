"""What programs in a run's sandbox reached, or tried to: an event each, and a line in the log."""

import logging
from collections import Counter

from policies.hosts import Target
from proxy.agent.events import EgressDecided, Emit, Event
from proxy.agent.guard import Guard
from proxy.agent.task import Task
from sandbox_runtime.egress.decision import Decision

log = logging.getLogger(__name__)
STILL_OPEN = "still open when the run ended"


class EgressWatch:
    """Listens to the decisions on one run's connections."""

    def __init__(self, task: Task, emit: Emit) -> None:
        self._run_id = task.run_id
        self._guard = Guard(task.profile, self._tell)
        self._emit: Emit | None = emit
        self._open = Counter[Target]()

    async def asked(self, target: Target) -> str | None:
        """Why a connection is not to be, which the sandbox's own rules allow."""
        refused = await self._guard.egress_refusal(target)
        if refused is None and self._emit is not None:
            self._open[target] += 1
        return refused

    async def decided(self, decision: Decision) -> None:
        """A connection is over, or was not to be."""
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
        target = Target(decision.host, decision.port)
        if self._open[target] > 1:
            self._open[target] -= 1
        else:
            self._open.pop(target, None)
        await self._tell(EgressDecided(decision))

    async def tell_open(self) -> None:
        """Tell of the connections that outlive the run."""
        for target in list(self._open.elements()):
            decision = Decision(target.host, target.port, "allowed", STILL_OPEN, 0, 0, 0.0)
            await self._tell(EgressDecided(decision))

    def close(self) -> None:
        """Nobody listens to the run any more; what is still to come goes to the log alone."""
        self._emit = None
        self._open.clear()

    async def _tell(self, event: Event) -> None:
        if self._emit is not None:
            await self._emit(event)
