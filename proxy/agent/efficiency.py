"""What a run has cost and what it used its computer for."""

from collections.abc import Mapping
from typing import Any, TypedDict

from policies.capabilities import Capability, capabilities_of
from proxy.agent.usage import tokens


class CapabilityUse:
    """In how many turns a run used what.

    As in the paper a turn counts once for each capability, however many of its calls use it.
    """

    def __init__(self) -> None:
        self.turns = dict.fromkeys(map(str, Capability), 0)
        self._in_this_turn = frozenset[Capability]()

    def begin_turn(self) -> None:
        """What is noted from now on belongs to another turn."""
        self._in_this_turn = frozenset()

    def note(self, tool: str, arguments: object) -> None:
        """A call that is made, by the tool's proper name."""
        used = capabilities_of(tool, arguments)
        for capability in used - self._in_this_turn:
            self.turns[capability] += 1
        self._in_this_turn |= used


class TokenCounts(TypedDict):
    """Of all model calls, as a Tally has them."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int


class Times(TypedDict):
    """What a run's time went to, as a Tally has it."""

    wall_ms: int
    model_ms: int
    sandbox_ms: int
    own_ms: int


def token_counts(usage: Mapping[str, Any]) -> TokenCounts:
    """By the summed usage of the calls."""
    return TokenCounts(
        prompt_tokens=tokens(usage, "prompt_tokens"),
        completion_tokens=tokens(usage, "completion_tokens"),
        reasoning_tokens=tokens(_details(usage, "completion_tokens_details"), "reasoning_tokens"),
        cached_tokens=tokens(_details(usage, "prompt_tokens_details"), "cached_tokens"),
    )


def times(*, wall_s: float, model_s: float, sandbox_s: float) -> Times:
    """What neither model nor sandbox took is ours."""
    wall_ms, model_ms, sandbox_ms = (int(each * 1000) for each in (wall_s, model_s, sandbox_s))
    own_ms = max(0, wall_ms - model_ms - sandbox_ms)
    return Times(wall_ms=wall_ms, model_ms=model_ms, sandbox_ms=sandbox_ms, own_ms=own_ms)


def _details(usage: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    details = usage.get(key)
    return details if isinstance(details, Mapping) else {}
