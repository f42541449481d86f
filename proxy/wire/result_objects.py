"""What a run has cost, as `usage.sandbox` tells it.

In whole numbers, for LangChain adds up what usages have in them and warns of all else.
"""

from collections.abc import Mapping
from typing import Any

from policies.capabilities import Capability

_OTHERWISE = ("capability_turns", "cost_usd")
"""What is told in other words."""


def efficiency(tally: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Tally, or of several added up, and the shares that they make."""
    told = {name: value for name, value in tally.items() if name not in _OTHERWISE}
    if (cost := tally.get("cost_usd")) is not None:
        told["cost_microusd"] = round(1_000_000 * cost)
    turns = {str(each): tally["capability_turns"].get(each, 0) for each in Capability}
    capabilities = {
        name: {"turns": count, "permille": _permille(count, tally["turns"])}
        for name, count in turns.items()
    }
    env_permille = _permille(tally["env_tokens"], tally["trajectory_tokens"])
    return {**told, "env_permille": env_permille, "capabilities": capabilities}


def _permille(part: int, whole: int) -> int:
    return round(1000 * part / whole) if whole else 0
