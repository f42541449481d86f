"""The decisions of the sandbox pool: how many sandboxes may exist, how many stay idle, and when a
request must wait."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

from policies.egress import Egress
from policies.isolation import Isolation

OnMiss = Literal["create", "wait", "fail"]
ResizableLimits = tuple[int, float, int]
PoolKey = tuple[tuple[str, object], ...]

RESIZABLE_FIELDS = ("memory_mib", "cpus", "pids")
"""Fields of Isolation that can be changed in a running sandbox."""
LEASE_FIELDS = ("egress",)
"""Fields of Isolation that take effect only when a sandbox is leased."""

MIN_START_BACKOFF_S = 1.0
MAX_START_BACKOFF_S = 30.0
NEWEST_WEIGHT = 0.2
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 300.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The size of the pool, and what happens if no sandbox is free. Raises ValueError."""

    idle: int = 2
    """Sandboxes that are kept ready for each isolation; 0: each is started when it is asked for."""
    max_total: int = 32
    """Sandboxes at one time: starting, ready, leased and ending."""
    memory_budget_mib: int | None = None
    """The most that the memory limits of all sandboxes may add up to; null: no limit."""
    ttl_s: float = 3600.0
    """Age at which a ready sandbox is replaced."""
    on_miss: OnMiss = "create"
    """create: start a sandbox, or wait if there is no room; wait: wait for one that is started when
    the processor is free for it; fail: refuse the request."""
    max_waiting: int = 256
    """Requests that may wait for a sandbox; the next one is refused."""
    wait_s: float = 120.0
    """How long a request waits at most."""

    def __post_init__(self) -> None:
        budget = self.memory_budget_mib
        for fault, holds in (
            ("idle must not be negative", self.idle >= 0),
            ("max_total must be at least 1", self.max_total >= 1),
            ("idle must not be more than max_total", self.idle <= self.max_total),
            ("memory_budget_mib must be at least 1", budget is None or budget >= 1),
            ("ttl_s must be more than 0", self.ttl_s > 0),
            ("max_waiting must not be negative", self.max_waiting >= 0),
            ("wait_s must be more than 0", self.wait_s > 0),
            ("on_miss: fail needs idle of at least 1", self.on_miss != "fail" or self.idle >= 1),
        ):
            if not holds:
                raise ValueError(fault)


@dataclass(frozen=True, slots=True)
class Load:
    """A number of sandboxes and the memory that they may take."""

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
    """Return the isolation that a sandbox is created with: without the fields set when leased."""
    return replace(isolation, egress=Egress())


def pool_key(isolation: Isolation) -> PoolKey:
    """Return the settings that are fixed when a sandbox is created. A sandbox suits every request
    with the same key."""
    return _without(isolation, RESIZABLE_FIELDS + LEASE_FIELDS)


def exact_pool_key(isolation: Isolation) -> PoolKey:
    """Return the pool key for a backend that cannot change limits later."""
    return _without(isolation, LEASE_FIELDS)


def _without(isolation: Isolation, names: tuple[str, ...]) -> PoolKey:
    # By exclusion, so that a field added to Isolation is never left out by mistake.
    kept = (field.name for field in fields(isolation) if field.name not in names)
    return tuple((name, getattr(isolation, name)) for name in kept)


def fits(settings: PoolSettings, load: Load) -> bool:
    """Return True if the settings permit such a load."""
    budget = settings.memory_budget_mib
    within = budget is None or load.memory_mib <= budget
    return within and load.sandboxes <= settings.max_total


def capacity(settings: PoolSettings, isolation: Isolation) -> int:
    """Return how many sandboxes with this isolation there may be at one time."""
    if settings.memory_budget_mib is None:
        return settings.max_total
    return min(settings.max_total, settings.memory_budget_mib // isolation.memory_mib)


def idle_to_evict(settings: PoolSettings, load: Load, idle: Iterable[Load]) -> int | None:
    """Return how many of the idle sandboxes, in their order, must end before `load` is permitted,
    or None if it is too much even without them."""
    if fits(settings, load):
        return 0
    for number, each in enumerate(idle, 1):
        load -= each
        if fits(settings, load):
            return number
    return None


def max_background_starts(cores: int) -> int:
    """Return how many sandboxes may start at a time in advance: commands run meanwhile."""
    return max(1, cores // 2)


def max_parallel_starts(settings: PoolSettings, cores: int) -> int:
    """Return how many may start at a time for requests that wait: with more, all get slower."""
    match settings.on_miss:
        case "create":
            return 2 * cores
        case "wait":
            return max_background_starts(cores)
        case "fail":
            return 0


def start_backoff_s(failures: int) -> float:
    """Return how long no sandbox is started in advance after so many failures in a row."""
    return min(MAX_START_BACKOFF_S, MIN_START_BACKOFF_S * 2.0 ** min(failures - 1, 10))


def moving_mean(mean: float, newest: float) -> float:
    """Return an exponential moving average."""
    return mean + NEWEST_WEIGHT * (newest - mean)


def retry_after_s(
    *, has_room: bool, ahead: int, leased: int, start_s: float, lease_s: float
) -> float:
    """Return when another attempt may succeed: after one start if there is room, else once all the
    requests `ahead` had their turn."""
    estimate_s = start_s if has_room else lease_s * (ahead + 1) / max(1, leased)
    return min(max(estimate_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
