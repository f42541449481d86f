"""What a run has cost and what it used its computer for."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies.capabilities import Capability, capabilities_of
from proxy.agent.events import Emit, Event, ToolCallStarted, TurnStarted
from proxy.agent.task import Tally
from proxy.agent.usage import tokens


class CapabilityUse:
    """Hears a run before its listeners do, and counts in how many turns it used what.

    As in the paper a turn counts once for each capability, however many of its calls use it.
    """

    def __init__(self, emit: Emit) -> None:
        self.turns = Counter[str](dict.fromkeys(map(str, Capability), 0))
        self._emit = emit
        self._in_this_turn = frozenset[Capability]()

    async def __call__(self, event: Event) -> None:
        """Hear an event and pass it on."""
        if isinstance(event, TurnStarted):
            self._in_this_turn = frozenset()
        elif isinstance(event, ToolCallStarted):
            used = capabilities_of(event.name, event.arguments)
            self.turns.update(map(str, used - self._in_this_turn))
            self._in_this_turn |= used
        await self._emit(event)


def with_tokens(tally: Tally, usage: Mapping[str, Any]) -> Tally:
    """The tally with the tokens of all model calls, by their summed usage."""
    return replace(
        tally,
        prompt_tokens=tokens(usage, "prompt_tokens"),
        completion_tokens=tokens(usage, "completion_tokens"),
        reasoning_tokens=tokens(_details(usage, "completion_tokens_details"), "reasoning_tokens"),
        cached_tokens=tokens(_details(usage, "prompt_tokens_details"), "cached_tokens"),
    )


def with_times(tally: Tally, *, wall_s: float, model_s: float, sandbox_s: float) -> Tally:
    """The tally with what the run's time went to: what neither model nor sandbox took is ours."""
    wall_ms, model_ms, sandbox_ms = (int(each * 1000) for each in (wall_s, model_s, sandbox_s))
    own_ms = max(0, wall_ms - model_ms - sandbox_ms)
    return replace(tally, wall_ms=wall_ms, model_ms=model_ms, sandbox_ms=sandbox_ms, own_ms=own_ms)


def _details(usage: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    details = usage.get(key)
    return details if isinstance(details, Mapping) else {}
