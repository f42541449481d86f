"""Where a client's program plays its scenarios: one line of JSON for each.

It knows nothing of the house: what to say and where comes as JSON in the first argument.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
SAID: dict[str, str] = GIVEN["said"]
"""By scenario."""
MODEL: str = GIVEN["model"]
KEY = "sk-of-the-client"
TIMEOUT_S = 30

WARMTH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "warmth",
        "description": "How warm it is in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def warmth(city: str) -> str:
    """How warm it is in a city."""
    return {"Bonn": "21 degrees"}[city]


Way = Callable[[str, str], Any]
"""Ask at this address (with /v1) in these words; gives what the client shows of the answer."""


def play(ways: Mapping[str, Way], alone: Mapping[str, Callable[[str], Any]]) -> None:
    """Ask everything in every way, and play the scenarios that are asked in one way only."""
    # One loop for all: several clients keep their connections between requests.
    with asyncio.Runner() as runner:
        for profile, places in GIVEN["places"].items():
            for scenario, words in GIVEN["said_in_every_way"].items():
                url = places.get(scenario, places["others"])
                for way, ask in ways.items():
                    _tell(profile, f"{scenario} {way}", _seen(runner, ask, url, words))
            for scenario, act in alone.items():
                _tell(profile, scenario, _seen(runner, act, places["others"]))


def _tell(profile: str, scenario: str, seen: Mapping[str, Any]) -> None:
    line = {"profile": profile, "scenario": scenario, **seen}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _seen(runner: asyncio.Runner, act: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    try:
        seen = act(*arguments)
        return {"seen": runner.run(seen) if inspect.iscoroutine(seen) else seen}
    except Exception as error:  # noqa: BLE001 - what a client raises is what the test asks for
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        status = getattr(error, "status_code", None)
        return {"raised": {"kind": f"{kind} {status or ''}".strip(), "words": str(error)}}
