"""Run the scenarios of a client program and print one line of JSON for each.

The program knows nothing of the proxy: prompts and URLs come as JSON in its first argument.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
PROMPTS: dict[str, str] = SETTINGS["prompts"]
"""The prompt of each scenario."""
MODEL: str = SETTINGS["model"]
KEY = "sk-of-the-client"
TIMEOUT_S = 30

WARMTH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "warmth",
        "description": "Return the temperature in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def warmth(city: str) -> str:
    """Return the temperature in a city."""
    return {"Bonn": "21 degrees"}[city]


Variant = Callable[[str, str], Any]
"""Send a prompt to a base URL (with /v1) and return what the client shows of the answer."""


def run_scenarios(
    variants: Mapping[str, Variant], scenarios: Mapping[str, Callable[[str], Any]]
) -> None:
    """Run each shared scenario in each variant, and the scenarios with a function of their own."""
    # One event loop for all: several clients keep their connections between requests.
    with asyncio.Runner() as runner:
        for profile, urls in SETTINGS["urls"].items():
            for scenario, prompt in SETTINGS["shared_prompts"].items():
                url = urls.get(scenario, urls["others"])
                for variant, ask in variants.items():
                    _print_result(profile, f"{scenario} {variant}", _run(runner, ask, url, prompt))
            for scenario, act in scenarios.items():
                _print_result(profile, scenario, _run(runner, act, urls["others"]))


def _print_result(profile: str, scenario: str, seen: Mapping[str, Any]) -> None:
    line = {"profile": profile, "scenario": scenario, **seen}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _run(runner: asyncio.Runner, act: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    try:
        seen = act(*arguments)
        return {"seen": runner.run(seen) if inspect.iscoroutine(seen) else seen}
    except Exception as error:  # noqa: BLE001 - the test compares the error
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        status = getattr(error, "status_code", None)
        return {"raised": {"kind": f"{kind} {status or ''}".strip(), "words": str(error)}}
