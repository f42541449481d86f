"""What programs in a run's sandbox reached, or tried to: an event each, and a line in the log."""

import logging

from proxy.agent.events import EgressDecided, Emit
from sandbox_runtime.egress.decision import Decision

log = logging.getLogger(__name__)


class EgressWatch:
    """Listens to the decisions on one run's connections."""

    def __init__(self, run_id: str, emit: Emit) -> None:
        self._run_id = run_id
        self._emit: Emit | None = emit

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
        if self._emit:
            await self._emit(EgressDecided(decision))

    def close(self) -> None:
        """Nobody listens to the run any more; what is still to come goes to the log alone."""
        self._emit = None
