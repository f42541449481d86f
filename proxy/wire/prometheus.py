"""Our numbers in the text format of Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Any

from policies.capabilities import Capability

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "idle", "lent", "ending")
POOL_COUNTS = {
    "hits": "Requests that found a sandbox ready.",
    "misses": "Requests that found none.",
    "refused": "Requests that were told to come again.",
    "replaced": "Ready sandboxes given up: dead, too old, of an old image, of other limits.",
    "started": "Sandboxes started.",
    "failed": "Starts that failed.",
}
SPENT = {
    "turns": "Model calls with tools.",
    "llm_calls": "Model calls.",
    "tool_calls": "Calls of the sandbox's tools.",
    "prompt_tokens": "Tokens sent to the model.",
    "cached_tokens": "Those of them that a cache had.",
    "env_tokens": "Those of them that tools had put out and that were sent for the first time.",
    "completion_tokens": "Tokens that the model wrote.",
    "reasoning_tokens": "Those of them that were thinking.",
    "trajectory_tokens": "Tokens sent and written, each counted once.",
}
SECONDS = ("model", "sandbox", "own")


def run_metrics(in_flight: int, ended: Mapping[str, int]) -> str:
    """Of the runs."""
    return _metric("runs_in_flight", "gauge", "Runs under way.", [("", in_flight)]) + _metric(
        "runs_total",
        "counter",
        "Runs that have ended, by how.",
        ((f'{{stop_reason="{reason}"}}', count) for reason, count in sorted(ended.items())),
    )


def efficiency_metrics(spent: Mapping[str, Any]) -> str:
    """Of what the runs that came to a result have cost; `spent` has the fields of a Tally."""
    seconds = ((f'{{spent="{name}"}}', spent[f"{name}_ms"] / 1000) for name in SECONDS)
    turns = (
        (f'{{capability="{name}"}}', spent["capability_turns"].get(name, 0)) for name in Capability
    )
    return (
        "".join(
            _metric(f"{name}_total", "counter", help, [("", spent[name])])
            for name, help in SPENT.items()
        )
        + _metric("run_seconds_total", "counter", "What the runs' time went to.", seconds)
        + _metric("capability_turns_total", "counter", "Turns that used a meta-capability.", turns)
    )


def watch_metrics(rules: Mapping[tuple[str, str], int], audit_failures: int) -> str:
    """Of what is watched; `rules` has how often each was met, by name and action."""
    met = (
        (f'{{rule="{rule}",action="{action}"}}', count)
        for (rule, action), count in sorted(rules.items())
    )
    return _metric("rules_met_total", "counter", "Rules that were met.", met) + _metric(
        "audit_failures_total", "counter", "Audit logs that broke off.", [("", audit_failures)]
    )


def pool_metrics(stats: Mapping[str, int]) -> str:
    """Of the pool; `stats` has the fields of PoolStats."""
    states = [(f'{{state="{state}"}}', stats[state]) for state in STATES]
    return (
        _metric("pool_sandboxes", "gauge", "Sandboxes, by state.", states)
        + _metric("pool_waiting", "gauge", "Requests without one yet.", [("", stats["waiting"])])
        + "".join(
            _metric(f"pool_{name}_total", "counter", help, [("", stats[name])])
            for name, help in POOL_COUNTS.items()
        )
    )


def _metric(name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> str:
    head = f"# HELP sandbox_{name} {help}\n# TYPE sandbox_{name} {kind}\n"
    return head + "".join(f"sandbox_{name}{labels} {value}\n" for labels, value in samples)
