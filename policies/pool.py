"""The decisions of the sandbox pool: how many sandboxes may exist, how many stay ready, and when a
request must wait."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Literal

from policies.egress import Egress
from policies.isolation import Isolation

OnMiss = Literal["create", "wait", "fail"]
ResizableLimits = tuple[int, float, int]
PoolKey = tuple[object, ...]
"""The values of the fields of Isolation in which a sandbox and a request for it must be equal."""

RESIZABLE_FIELDS = ("memory_mib", "cpus", "pids")
"""Fields of Isolation that can be changed in a running sandbox."""
LEASE_FIELDS = ("network",)
"""Fields of Isolation that take effect only when a sandbox is leased."""
_EXACT_KEY_FIELDS = tuple(
    field.name for field in fields(Isolation) if field.name not in LEASE_FIELDS
)
"""All fields of Isolation except LEASE_FIELDS, so that a new field is in the key by default."""
_read_exact_key = attrgetter(*_EXACT_KEY_FIELDS)
_read_key = attrgetter(*(name for name in _EXACT_KEY_FIELDS if name not in RESIZABLE_FIELDS))

_MIN_START_BACKOFF_S, _MAX_START_BACKOFF_S = 1.0, 30.0
_NEWEST_WEIGHT = 0.2
_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1.0, 300.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The size of the pool, and its behaviour if no sandbox is ready. Raises ValueError."""

    min_ready: int = 2
    """Number of sandboxes that are kept ready for the isolation of the default profile. 0:
    sandboxes are started on demand."""
    max_sandboxes: int = 32
    """Maximum number of sandboxes that are starting, ready, leased or ending."""
    memory_budget_mib: int | None = None
    """Maximum sum of the memory limits of all sandboxes, in MiB. null: no limit."""
    ttl_s: float = 3600.0
    """Age in seconds at which a ready sandbox is replaced."""
    on_miss: OnMiss = "create"
    """Behaviour if no sandbox is ready. create: start a sandbox, or wait for one if `max_sandboxes`
    or `memory_budget_mib` is reached. wait: wait for a sandbox that the pool starts in the
    background. fail: refuse the request."""
    max_parallel_starts: int | None = None
    """Maximum number of sandboxes that start at a time. At most a quarter of these starts, but at
    least one, may be in the background: to keep sandboxes ready, and with `on_miss: wait`. null:
    two per CPU core of this host (for each Docker engine that answers, if there are several); on
    Kubernetes, 64."""
    queue_size: int = 256
    """Maximum number of requests that wait for a sandbox. When one more request arrives, the newest
    waiting request of the API key with the most waiting requests is refused."""
    queue_timeout_s: float = 120.0
    """Maximum time that a request waits for a sandbox, in seconds; then the request is refused."""

    def __post_init__(self) -> None:
        budget, starts = self.memory_budget_mib, self.max_parallel_starts
        for rule, is_kept in (
            ("min_ready must not be negative", self.min_ready >= 0),
            ("max_sandboxes must be at least 1", self.max_sandboxes >= 1),
            ("min_ready must not be more than max_sandboxes", self.min_ready <= self.max_sandboxes),
            ("memory_budget_mib must be at least 1", budget is None or budget >= 1),
            ("ttl_s must be more than 0", self.ttl_s > 0),
            ("max_parallel_starts must be at least 1", starts is None or starts >= 1),
            ("queue_size must not be negative", self.queue_size >= 0),
            ("queue_timeout_s must be more than 0", self.queue_timeout_s > 0),
            (
                "on_miss: fail needs min_ready of at least 1",
                self.on_miss != "fail" or self.min_ready >= 1,
            ),
        ):
            if not is_kept:
                raise ValueError(rule)


@dataclass(frozen=True, slots=True)
class Load:
    """A number of sandboxes and the sum of their memory limits."""

    sandboxes: int = 0
    memory_mib: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.sandboxes + other.sandboxes, self.memory_mib + other.memory_mib)

    def __sub__(self, other: "Load") -> "Load":
        return Load(self.sandboxes - other.sandboxes, self.memory_mib - other.memory_mib)


def resizable_limits(isolation: Isolation) -> ResizableLimits:
    """Return the limits that can be changed in a running sandbox."""
    return isolation.memory_mib, isolation.cpus, isolation.pids


def without_lease_fields(isolation: Isolation) -> Isolation:
    """Return the isolation for creating a sandbox: without the fields that are set by a lease."""
    return replace(isolation, network=Egress())


def pool_key(isolation: Isolation) -> PoolKey:
    """Return the settings that are fixed when a sandbox is created. A ready sandbox can serve every
    request with the same key."""
    key: PoolKey = _read_key(isolation)
    return key


def exact_pool_key(isolation: Isolation) -> PoolKey:
    """Return the pool key for a backend that cannot change limits later."""
    key: PoolKey = _read_exact_key(isolation)
    return key


@lru_cache
def with_max_sandboxes(settings: PoolSettings, max_sandboxes: int) -> PoolSettings:
    """Return the settings for at most `max_sandboxes` sandboxes, but at least 1. `min_ready` is
    reduced to the new maximum, too."""
    most = max(1, min(settings.max_sandboxes, max_sandboxes))
    return replace(settings, max_sandboxes=most, min_ready=min(settings.min_ready, most))


def fits(settings: PoolSettings, load: Load) -> bool:
    """Return True if the settings permit the load."""
    budget = settings.memory_budget_mib
    fits_memory = budget is None or load.memory_mib <= budget
    return fits_memory and load.sandboxes <= settings.max_sandboxes


def capacity(settings: PoolSettings, isolation: Isolation) -> int:
    """Return how many sandboxes with this isolation may exist at a time."""
    if settings.memory_budget_mib is None:
        return settings.max_sandboxes
    return min(settings.max_sandboxes, settings.memory_budget_mib // isolation.memory_mib)


def eviction_count(settings: PoolSettings, load: Load, idle: Iterable[Load]) -> int | None:
    """Return how many of the idle sandboxes, in their order, must be evicted before the settings
    permit `load`; None if evicting all of them is not enough."""
    if fits(settings, load):
        return 0
    for count, evicted in enumerate(idle, 1):
        load -= evicted
        if fits(settings, load):
            return count
    return None


def max_background_starts(parallel_starts: int) -> int:
    """Return how many of the parallel starts may be background starts, which keep sandboxes ready:
    a quarter, so that they do not slow down commands and the starts for waiting requests."""
    return max(1, parallel_starts // 4)


def max_replacements(settings: PoolSettings) -> int:
    """Return how many ready sandboxes may be replaced at a time because of their age. The others
    stay ready meanwhile."""
    return max(1, settings.min_ready // 4)


def max_starts_on_demand(settings: PoolSettings, parallel_starts: int) -> int:
    """Return how many of the parallel starts may be for waiting requests."""
    match settings.on_miss:
        case "create":
            return parallel_starts
        case "wait":
            return max_background_starts(parallel_starts)
        case "fail":
            return 0


def start_backoff_s(failures: int) -> float:
    """Return the pause before the next background start, in seconds, after `failures` failed starts
    in succession."""
    return min(_MAX_START_BACKOFF_S, _MIN_START_BACKOFF_S * 2.0 ** min(failures - 1, 10))


def moving_mean(mean: float, newest: float) -> float:
    """Return the exponential moving average after the newest value."""
    return mean + _NEWEST_WEIGHT * (newest - mean)


def retry_after_s(
    *, has_room: bool, waiting_ahead: int, leased_count: int, start_s: float, lease_s: float
) -> float:
    """Return an estimate of the seconds after which a refused request may succeed, from 1 to 300.

    If there is room for a sandbox, the estimate is the time of one start. Otherwise the estimate is
    the time until enough leases end for the `waiting_ahead` waiting requests and the refused
    request. `start_s` and `lease_s` are mean durations, `leased_count` is the number of leased
    sandboxes.
    """
    estimate_s = start_s if has_room else lease_s * (waiting_ahead + 1) / max(1, leased_count)
    return min(max(estimate_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
