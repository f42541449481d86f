"""A model whose turns never end."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from proxy.agent.events import OnDelta
from proxy.agent.model import Completion
from proxy.models.scripted import ScriptedModel


class StuckModel(ScriptedModel):
    """A model whose calls with tools never return after the first `turns`.

    Its call without tools never returns if `is_stuck_in_final_call`.
    """

    def __init__(
        self,
        replies: Sequence[Mapping[str, Any]],
        *,
        turns: int = 0,
        is_stuck_in_final_call: bool = False,
    ) -> None:
        super().__init__(replies)
        self._turns = turns
        self._is_stuck_in_final_call = is_stuck_in_final_call

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        position = sum(message["role"] == "assistant" for message in body["messages"])
        is_stuck = position >= self._turns if "tools" in body else self._is_stuck_in_final_call
        if is_stuck:
            await anyio.sleep_forever()
        return await super().complete(body, on_delta)
