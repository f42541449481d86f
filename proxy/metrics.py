"""The proxy's Prometheus metrics: their definitions, and the observers of runs, model calls and the
pool of sandboxes."""

import asyncio
import time
from collections import Counter as Totals
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.capabilities import Capability
from policies.limits import StopReason
from proxy.agent.events import (
    ChoiceEvent,
    Event,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    RuleMatched,
    RunFinished,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    TurnStarted,
)
from proxy.agent.model import Completion
from proxy.agent.result import Result, RunStats
from proxy.agent.task import AgentTask
from proxy.available_memory import AvailableMemory, resident_bytes
from sandbox_runtime.backends.docker_hosts import HostStats
from sandbox_runtime.pool.pool import Pool, PoolStats
from sandbox_runtime.tools import make_tools

NAMESPACE, NEW_PREFIX = "llm_sandbox", "llm_"
"""NAMESPACE is the prefix of all metrics' names. NEW_PREFIX is the beginning of NAMESPACE that the
deprecated names lack."""
OTHER = "other"
"""The label value of models, profiles and tools that have no value of their own."""
MAX_MODELS = 32
"""Maximum number of models with a label value of their own, in addition to the configured
models."""
MAX_PROFILES = 32
MAX_LABEL_CHARS = 128
MAX_AMOUNT = 2**53
"""Maximum that one run adds to a counter, because token counts come from the backend and may be
false."""

RUN_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 1800, 3600)
TURN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
"""Buckets of the durations of turns and of model calls."""
FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60)
COMMAND_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
POOL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

CLIENT_LEFT, FAILED = "client_left", "failed"
END_REASONS = (*(str(reason) for reason in StopReason), CLIENT_LEFT, FAILED)
STATS_COUNTERS = {
    "turns": "Turns of the agent loop.",
    "llm_calls": "Model calls.",
    "tool_calls": "Calls of the sandbox's tools.",
    "prompt_tokens": "Tokens sent to the model.",
    "cached_tokens": "Tokens sent to the model that it had in its cache.",
    "env_tokens": "Tokens of tool output, each counted when it is first sent to the model.",
    "completion_tokens": "Tokens that the model wrote.",
    "reasoning_tokens": "Tokens of reasoning that the model wrote.",
    "trajectory_tokens": "Tokens sent and written, each counted once.",
}
"""The help texts of counters, by the field of RunStats that each counter adds up."""
TIME_KINDS = ("model", "sandbox", "own")
POOL_COUNTS = {
    "hits": "Leases that found a sandbox ready.",
    "misses": "Leases that found no sandbox ready.",
    "refused": "Leases that were refused with a Retry-After.",
    "replaced": "Ready sandboxes discarded: dead, expired, of an old image, or with other limits.",
    "started": "Sandboxes started.",
    "failed": "Sandbox starts that failed.",
}
"""The help texts of counters, by the field of PoolStats that each counter shows."""
OUTPUT_DELTAS = (ReasoningDelta, TextDelta, ToolCallDelta)

Complete = Callable[[Mapping[str, Any], OnDelta | None], Awaitable[Completion]]


class Metrics(Collector):
    """The metrics of one proxy, in a registry of their own."""

    def __init__(self, models: Iterable[str] = ()) -> None:
        """Each name in `models`, the configured models, has a label value of its own."""
        self._registry = CollectorRegistry()
        self.durations = _Durations(self._registry)
        self.counts = _Counts(self._registry)
        self.totals = _RunTotals()
        self._registry.register(self.totals)
        self._readings = _ScrapedValues()
        self._registry.register(self._readings)
        self.models = _LabelValues(MAX_MODELS, models)
        self.profiles = _LabelValues(MAX_PROFILES)
        self.tools = _LabelValues(0, (tool.name for tool in make_tools()))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and all except histograms also under their deprecated names. The
        `_created` samples are left out, because they would double the number of series."""
        for family in self._registry.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family
            if family.type != "histogram":
                yield _with_old_name(family)

    def start_run(self, task: AgentTask) -> "_RunMetrics":
        """Count a run as in flight. Return the observer that counts its end."""
        self.profiles.add(task.profile.name)
        self.counts.runs_in_flight.inc()
        return _RunMetrics(self, task)

    # Model calls

    async def observe_model_call(
        self, complete: Complete, body: Mapping[str, Any], on_delta: OnDelta | None
    ) -> Completion:
        """Return the completion of a model call, and observe its duration. The model has a label
        value of its own once one of its calls was answered. Raises the errors of `complete`."""
        model, began = str(body.get("model")), time.monotonic()
        first: float | None = None

        def record_first_delta(delta: ModelDelta) -> Awaitable[None]:
            nonlocal first
            if first is None and isinstance(delta, OUTPUT_DELTAS):
                first = time.monotonic()
            assert on_delta
            return on_delta(delta)

        try:
            reply = await complete(body, record_first_delta if on_delta else None)
            self.models.add(model)
            return reply
        finally:
            label = self.models.label(model)
            self.durations.model_call(label).observe(time.monotonic() - began)
            if first is not None:
                self.durations.first_token(label).observe(first - began)

    # Values that are read at each scrape

    def observe_pool(self, pool: Pool) -> None:
        """Observe the leases of a pool, and read its counts."""
        self.register_pool_stats(pool.stats)
        pool.set_acquired_handler(self._observe_acquired_lease)

    def register_pool_stats(self, get_stats: Callable[[], PoolStats]) -> None:
        """Register `get_stats`, which returns the current counts of the pool."""
        self._readings.pool_stats = get_stats

    def pool_stats(self) -> PoolStats | None:
        """Return the counts of the pool, or None before `register_pool_stats`."""
        return self._readings.pool_stats() if self._readings.pool_stats else None

    def _observe_acquired_lease(self, queued_s: float, acquired_s: float) -> None:
        self.durations.queue_wait.observe(queued_s)
        self.durations.acquire.observe(acquired_s)

    def register_memory(self, available: AvailableMemory) -> None:
        """Register the object from which each scrape reads the available memory and the number of
        refused requests."""
        self._readings.available_memory = available

    def register_host_stats(self, get_stats: Callable[[], Sequence[HostStats]]) -> None:
        """Register `get_stats`, which returns the state of each Docker engine at each scrape."""
        self._readings.host_stats = get_stats

    def register_audit_failures(self, count_failures: Callable[[], int]) -> None:
        """Register `count_failures`, which returns the number of failed audit logs."""
        self._readings.audit_failures = count_failures


class _RunMetrics:
    """The metrics of one run, as an observer of the run."""

    event_types = frozenset({ChoiceEvent, TurnStarted, RunFinished, ToolCallFinished, RuleMatched})

    def __init__(self, metrics: Metrics, task: AgentTask) -> None:
        self._metrics = metrics
        self._model = task.model
        # Unlike the model's label, this one cannot change during the run.
        self._profile = metrics.profiles.label(task.profile.name)
        self._began_at = time.monotonic()
        self._turn_starts: dict[int, float] = {}
        """The start of the current turn of each choice, by the choice's index."""

    async def on_event(self, event: Event) -> None:
        index = 0
        if isinstance(event, ChoiceEvent):
            index, event = event.index, event.event
        metrics = self._metrics
        match event:
            case TurnStarted() | RunFinished():
                now = time.monotonic()
                if index in self._turn_starts:
                    turn = metrics.durations.turn(metrics.models.label(self._model), self._profile)
                    turn.observe(now - self._turn_starts.pop(index))
                if isinstance(event, TurnStarted):
                    self._turn_starts[index] = now
            case ToolCallFinished(name=name, duration_s=duration_s):
                tool = metrics.tools.label(name)
                metrics.durations.command(tool, self._profile).observe(duration_s)
            case RuleMatched(rule=rule, action=action):
                metrics.counts.rules_met.labels(rule, action).inc()

    async def on_result(self, result: Result) -> None:
        for each in (result, *result.others):
            self._metrics.totals.add(each.stats)
        self._count_end(str(result.stop_reason))

    async def on_error(self, error: BaseException) -> None:
        self._count_end(CLIENT_LEFT if isinstance(error, asyncio.CancelledError) else FAILED)

    def _count_end(self, reason: str) -> None:
        metrics = self._metrics
        metrics.counts.runs_in_flight.dec()
        metrics.counts.runs.labels(reason).inc()
        duration = metrics.durations.run(metrics.models.label(self._model), self._profile)
        duration.observe(time.monotonic() - self._began_at)


class _LabelValues:
    """The values that a label may have. All other values become `other`."""

    def __init__(self, max_added: int, known: Iterable[str] = ()) -> None:
        """`max_added` is the number of values that may be added to `known`."""
        self._known = set(known)
        self._max_values = max_added + len(self._known)

    def add(self, value: str) -> None:
        """Add a printable value of at most `MAX_LABEL_CHARS`, unless the maximum number is
        reached."""
        has_room = len(self._known) < self._max_values
        if has_room and 0 < len(value) <= MAX_LABEL_CHARS and value.isprintable():
            self._known.add(value)

    def label(self, value: str) -> str:
        """Return the value if it is known, else `other`."""
        return value if value in self._known else OTHER


class _Durations:
    """The histograms of durations. For a histogram with labels, the attribute is a function that
    returns the histogram of given label values. The function is cached, because `labels` takes
    longer than `observe`; `_LabelValues` bounds the number of label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.histograms: list[Histogram] = []

        def histogram(
            name: str, help_text: str, buckets: Sequence[float], *labels: str
        ) -> Histogram:
            made = Histogram(
                name,
                help_text,
                labels,
                NAMESPACE,
                unit="seconds",
                registry=registry,
                buckets=buckets,
            )
            self.histograms.append(made)
            return made

        def labelled_histogram(
            name: str, help_text: str, buckets: Sequence[float], *labels: str
        ) -> Callable[..., Histogram]:
            return cache(histogram(name, help_text, buckets, *labels).labels)

        words = "Time from the start of a run to its end, however it ended."
        self.run = labelled_histogram("run_duration", words, RUN_BUCKETS_S, "model", "profile")
        words = "Time from the start of a turn to the next turn's, or to the end of the run."
        self.turn = labelled_histogram("turn_duration", words, TURN_BUCKETS_S, "model", "profile")
        words = "Time of a run's model call, retries and the client's reading of a stream included."
        self.model_call = labelled_histogram("model_call_duration", words, TURN_BUCKETS_S, "model")
        words = "Time from a run's streamed model call to the first piece of the reply."
        self.first_token = labelled_histogram(
            "time_to_first_token", words, FIRST_TOKEN_BUCKETS_S, "model"
        )
        words = "Time of a tool call, the wait for its sandbox included."
        self.command = labelled_histogram(
            "command_duration", words, COMMAND_BUCKETS_S, "tool", "profile"
        )
        words = "Time until a lease was assigned its sandbox, of leases that got one."
        self.queue_wait = histogram("pool_queue_wait", words, POOL_BUCKETS_S)
        words = "Time until a lease's sandbox could be used, the wait in the queue included."
        self.acquire = histogram("pool_acquire", words, POOL_BUCKETS_S)


class _Counts:
    """Counts of ended runs, running runs and rule matches since the start of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, labels, NAMESPACE, registry=registry)

        self.runs_in_flight = Gauge(
            "runs_in_flight", "Runs under way.", namespace=NAMESPACE, registry=registry
        )
        self.runs = counter("runs", "Runs that have ended, by stop reason.", "stop_reason")
        self.rules_met = counter("rules_met", "Rule matches.", "rule", "action")
        for value in END_REASONS:  # a series that begins at 0 has a rate from its first event on
            self.runs.labels(value)


class _RunTotals(Collector):
    """The sums of the statistics of all runs, read at each scrape."""

    def __init__(self) -> None:
        self._spent = Totals[str](dict.fromkeys(STATS_COUNTERS, 0))
        self._milliseconds = Totals[str](dict.fromkeys(TIME_KINDS, 0))
        self._capability_turns = Totals[str]({str(each): 0 for each in Capability})

    def add(self, stats: RunStats) -> None:
        """Add the statistics of one choice of a run that has a result: its token and call counts,
        its times and its capability turns."""
        for name in STATS_COUNTERS:
            self._spent[name] += _clamp(getattr(stats, name))
        for name in TIME_KINDS:
            self._milliseconds[name] += _clamp(getattr(stats, f"{name}_ms"))
        for capability, turns in stats.capability_turns.items():
            self._capability_turns[str(capability)] += _clamp(turns)

    def collect(self) -> Iterator[Metric]:
        for name, words in STATS_COUNTERS.items():
            yield CounterMetricFamily(f"{NAMESPACE}_{name}", words, self._spent[name])
        seconds = CounterMetricFamily(
            f"{NAMESPACE}_run_seconds",
            "Time of runs, by where it was spent.",
            labels=["spent"],
            unit="seconds",
        )
        for name, ms in self._milliseconds.items():
            seconds.add_metric([name], ms / 1000)
        yield seconds
        turns = CounterMetricFamily(
            f"{NAMESPACE}_capability_turns",
            "Turns that used a meta-capability.",
            labels=["capability"],
        )
        for capability, number in self._capability_turns.items():
            turns.add_metric([capability], number)
        yield turns


def _clamp(number: int) -> int:
    if number < 0:
        return 0
    return number if number < MAX_AMOUNT else MAX_AMOUNT


class _ScrapedValues(Collector):
    """Metrics whose values belong to other objects and are read at each scrape."""

    def __init__(self) -> None:
        self.pool_stats: Callable[[], PoolStats] | None = None
        self.audit_failures: Callable[[], int] | None = None
        self.host_stats: Callable[[], Sequence[HostStats]] | None = None
        self.available_memory: AvailableMemory | None = None

    def collect(self) -> Iterator[Metric]:
        failures = self.audit_failures() if self.audit_failures else 0
        yield CounterMetricFamily(
            f"{NAMESPACE}_audit_failures",
            "Audit logs that could not be written completely.",
            failures,
        )
        if self.pool_stats:
            yield from _pool_metrics(self.pool_stats())
        if self.available_memory:
            yield from _memory_metrics(self.available_memory)
        if self.host_stats:
            yield from _host_metrics(self.host_stats())


def _memory_metrics(available: AvailableMemory) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{NAMESPACE}_memory_available_bytes",
        "Memory that the machine, or the server's cgroup if that has less, has available.",
        available.available_bytes,
    )
    yield GaugeMetricFamily(
        f"{NAMESPACE}_memory_resident_bytes",
        "Resident memory of the server, sandboxes not included.",
        resident_bytes(),
    )
    yield CounterMetricFamily(
        f"{NAMESPACE}_memory_refused",
        "Requests refused because less than server.memory_reserve_mib would be available.",
        available.refused_count,
    )


def _host_metrics(stats: Sequence[HostStats]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        f"{NAMESPACE}_docker_host_up",
        "1 if the engine gets new sandboxes, 0 if it does not answer or fails a check; only with"
        " sandbox.docker.hosts.",
        labels=["host"],
    )
    sandboxes = GaugeMetricFamily(
        f"{NAMESPACE}_docker_host_sandboxes",
        "Sandboxes of this process on the engine; only with sandbox.docker.hosts.",
        labels=["host"],
    )
    for each in stats:
        up.add_metric([each.url], each.is_up)
        sandboxes.add_metric([each.url], each.sandboxes)
    yield from (up, sandboxes)


def _pool_metrics(stats: PoolStats) -> Iterator[Metric]:
    sandboxes = GaugeMetricFamily(
        f"{NAMESPACE}_pool_sandboxes", "Sandboxes, by state.", labels=["state"]
    )
    sandboxes.add_metric(["starting"], stats.starting)
    sandboxes.add_metric(["idle"], stats.idle)
    sandboxes.add_metric(["in_use"], stats.leased)
    sandboxes.add_metric(["ending"], stats.ending)
    yield sandboxes
    yield GaugeMetricFamily(
        f"{NAMESPACE}_pool_waiting", "Leases without a sandbox yet.", stats.waiting
    )
    for name, words in POOL_COUNTS.items():
        yield CounterMetricFamily(f"{NAMESPACE}_pool_{name}", words, getattr(stats, name))


_OLD_LABEL_VALUES = {("state", "in_use"): "lent", ("action", "log"): "flag"}
"""The label values of the last release, by the name of the label and its new value."""


def _with_old_name(family: Metric) -> Metric:
    """Return a metric with the name and the label values that it had in the last release."""
    new = f"{family.name}_total" if family.type == "counter" else family.name
    old = Metric(
        family.name.removeprefix(NEW_PREFIX), f"Deprecated: use {new}.", family.type, family.unit
    )
    for sample in family.samples:
        labels = {
            name: _OLD_LABEL_VALUES.get((name, value), value)
            for name, value in sample.labels.items()
        }
        old.add_sample(sample.name.removeprefix(NEW_PREFIX), labels, sample.value)
    return old
