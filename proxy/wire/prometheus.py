"""Our numbers in the text format of Prometheus."""

from collections.abc import Iterable, Mapping

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


def run_metrics(in_flight: int, ended: Mapping[str, int]) -> str:
    """Of the runs."""
    return _metric("runs_in_flight", "gauge", "Runs under way.", [("", in_flight)]) + _metric(
        "runs_total",
        "counter",
        "Runs that have ended, by how.",
        ((f'{{stop_reason="{reason}"}}', count) for reason, count in sorted(ended.items())),
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


def _metric(name: str, kind: str, help: str, samples: Iterable[tuple[str, int]]) -> str:
    head = f"# HELP sandbox_{name} {help}\n# TYPE sandbox_{name} {kind}\n"
    return head + "".join(f"sandbox_{name}{labels} {value}\n" for labels, value in samples)
