"""How many runs there are, and how those before them ended."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any

from policies.limits import StopReason
from proxy.agent.events import Emit, Event, OfChoice, RuleMet
from proxy.agent.result import Result, Tally, add

CLIENT_LEFT, FAILED = "client_left", "failed"
ENDINGS = (*(str(reason) for reason in StopReason), CLIENT_LEFT, FAILED)


class RunCounts:
    """Counted from the start of the process."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.ended = Counter[str](dict.fromkeys(ENDINGS, 0))
        self.spent: Mapping[str, Any] = Tally().counts()
        """What the runs that came to a result have cost, all together."""
        self.rules = Counter[tuple[str, str]]()
        """Those that were met, with what came of it."""

    def hearing(self, emit: Emit) -> Emit:
        """Count the rules that a run meets."""

        async def hear(event: Event) -> None:
            bare = event.event if isinstance(event, OfChoice) else event
            if isinstance(bare, RuleMet):
                self.rules[(bare.rule, bare.action)] += 1
            await emit(event)

        return hear

    async def of(self, run: Awaitable[Result]) -> Result:
        """See a run through."""
        self.in_flight += 1
        ending = FAILED
        try:
            result = await run
            ending = str(result.stop_reason)
            for each in (result, *result.others):
                # What is not known of one run's cost cannot be told of all.
                self.spent = add(self.spent, {**each.tally.counts(), "cost_usd": None})
        except asyncio.CancelledError:
            ending = CLIENT_LEFT
            raise
        finally:
            self.in_flight -= 1
            self.ended[ending] += 1
        return result
