"""How many sandboxes there are, how many of them wait for work, and who must wait for one."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

from policies.egress import Egress
from policies.isolation import Isolation

OnMiss = Literal["create", "wait", "fail"]
Limits = tuple[int, float, int]
Recipe = tuple[tuple[str, object], ...]

LIMITS = ("memory_mib", "cpus", "pids")
"""What can be changed in a running sandbox."""
UNBOUND = ("egress",)
"""What a sandbox is made without, and gets when it is lent."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
SHARE_OF_NEWEST = 0.2
SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many sandboxes are kept, and what happens to who finds none. Raises ValueError."""

    idle: int = 2
    """Kept ready for each isolation that is kept; 0: each is started when it is asked for."""
    max_total: int = 32
    """Sandboxes at one time: starting, ready, lent and ending."""
    memory_budget_mib: int | None = None
    """What the memory limits of all sandboxes may add up to; null: anything."""
    ttl_s: float = 3600.0
    """Age at which one that is ready is replaced."""
    on_miss: OnMiss = "create"
    """create: start one, or wait where there is no room; wait: for one that is started when the
    processor is free for it; fail: refuse."""
    max_waiting: int = 256
    """Requests that may wait until one is started for them; the next one is refused."""
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
    """Sandboxes and the memory they may take."""

    sandboxes: int = 0
    memory_mib: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.sandboxes + other.sandboxes, self.memory_mib + other.memory_mib)

    def __sub__(self, other: "Load") -> "Load":
        return Load(self.sandboxes - other.sandboxes, self.memory_mib - other.memory_mib)


def limits_of(isolation: Isolation) -> Limits:
    """The limits that can be changed in a running sandbox."""
    return isolation.memory_mib, isolation.cpus, isolation.pids


def unbound(isolation: Isolation) -> Isolation:
    """What a sandbox is made with: all but what it gets when it is lent."""
    return replace(isolation, egress=Egress())


def recipe(isolation: Isolation) -> Recipe:
    """What is settled when a sandbox is made: whoever wants the same of it can have it."""
    return _without(isolation, LIMITS + UNBOUND)


def exact_recipe(isolation: Isolation) -> Recipe:
    """The same, where the limits cannot be changed later."""
    return _without(isolation, UNBOUND)


def _without(isolation: Isolation, names: tuple[str, ...]) -> Recipe:
    # By exclusion: a wall that is added to Isolation is never left out by mistake.
    kept = (field.name for field in fields(isolation) if field.name not in names)
    return tuple((name, getattr(isolation, name)) for name in kept)


def fits(settings: PoolSettings, load: Load) -> bool:
    """Whether there may be so much."""
    budget = settings.memory_budget_mib
    within = budget is None or load.memory_mib <= budget
    return within and load.sandboxes <= settings.max_total


def most(settings: PoolSettings, isolation: Isolation) -> int:
    """How many of these there may be at one time."""
    if settings.memory_budget_mib is None:
        return settings.max_total
    return min(settings.max_total, settings.memory_budget_mib // isolation.memory_mib)


def how_many_to_end(settings: PoolSettings, load: Load, idle: Iterable[Load]) -> int | None:
    """How many of the idle ones, in their order, must go before there may be `load`.

    None: it is too much even without them.
    """
    if fits(settings, load):
        return 0
    for number, each in enumerate(idle, 1):
        load -= each
        if fits(settings, load):
            return number
    return None


def starts_ahead(cores: int) -> int:
    """How many may start at a time that nobody waits for: commands run meanwhile."""
    return max(1, cores // 2)


def starts_at_once(settings: PoolSettings, cores: int) -> int:
    """How many may start at a time because somebody waits: with more, all get slower."""
    match settings.on_miss:
        case "create":
            return 2 * cores
        case "wait":
            return starts_ahead(cores)
        case "fail":
            return 0


def rest_s(failures: int) -> float:
    """How long nothing is made in advance after so many failed starts in a row."""
    return min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(failures - 1, 10))


def moving_mean(mean: float, newest: float) -> float:
    """A mean that follows what was seen last."""
    return mean + SHARE_OF_NEWEST * (newest - mean)


def retry_after_s(*, has_room: bool, ahead: int, lent: int, start_s: float, lend_s: float) -> float:
    """When asking again may succeed: a start away, or once all that are `ahead` had their turn."""
    estimate_s = start_s if has_room else lend_s * (ahead + 1) / max(1, lent)
    return min(max(estimate_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
