"""How many runs there are, and how those before them ended."""

import asyncio
from collections import Counter
from collections.abc import Awaitable

from policies.limits import StopReason
from proxy.agent.task import Result

CLIENT_LEFT, FAILED = "client_left", "failed"
ENDINGS = (*(str(reason) for reason in StopReason), CLIENT_LEFT, FAILED)


class RunCounts:
    """Counted from the start of the process."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.ended = Counter[str](dict.fromkeys(ENDINGS, 0))

    async def of(self, run: Awaitable[Result]) -> Result:
        """See a run through."""
        self.in_flight += 1
        ending = FAILED
        try:
            result = await run
            ending = str(result.stop_reason)
        except asyncio.CancelledError:
            ending = CLIENT_LEFT
            raise
        finally:
            self.in_flight -= 1
            self.ended[ending] += 1
        return result
