"""One sandbox takes all of a resource and keeps it, while a neighbour's commands use the same one.

The programs are those of the escape attempts (`sandbox_runtime.escape`) and of the benchmark
(`bench.bombs`).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from bench.bombs import BOMBS
from bench.neighbours import BACKENDS, ISOLATION
from sandbox_runtime.escape import bombs, counters
from tests.attacks.neighbour import SHARED, WELL, Outcome, Range, firing_range
from tests.attacks.report import Finding

HOLD_S = 2
"""Timeout of the attacker's command, in seconds. The programs keep their resource for longer."""
_STRICT = {"isolation": {"level": "strict"}}


def _python(program: str) -> str:
    return f"exec python3 -I -S -u - <<'END'\n{program}\nEND"


@dataclass(frozen=True, slots=True)
class _Bomb:
    """A command that takes a resource, and the neighbour's command that needs the same one."""

    name: str
    command: str
    neighbour: str = WELL
    gap_on: frozenset[str] = frozenset()
    """Backends on which the documentation says that it does not hold."""
    is_strict: bool = False
    """True if both sandboxes have `isolation.level: strict`. Only runc needs it, so the attack is
    made there only."""


_RUNC = frozenset({"docker, runc"})
_BOMBS = (
    _Bomb("pseudo-terminals", _python(counters.TERMINALS), "test -t 0 && echo well"),
    _Bomb("AIO contexts", _python(counters.CONTEXTS), _python(counters.ONE_CONTEXT)),
    _Bomb("message queues", _python(counters.QUEUES), _python(counters.ONE_QUEUE)),
    _Bomb("inotify", _python(bombs.INOTIFY), _python(bombs.ONE_INOTIFY)),
    _Bomb("timers", _python(counters.TIMERS), _python(counters.ONE_TIMER), _RUNC),
    _Bomb("queued signals", _python(counters.SIGNALS), _python(counters.ONE_SIGNAL), _RUNC),
    _Bomb("files in flight", _python(counters.IN_FLIGHT), _python(counters.ONE_IN_FLIGHT), _RUNC),
    _Bomb("timers, strict", _python(counters.TIMERS), _python(counters.ONE_TIMER), is_strict=True),
    _Bomb(
        "queued signals, strict",
        _python(counters.SIGNALS),
        _python(counters.ONE_SIGNAL),
        is_strict=True,
    ),
    _Bomb(
        "files in flight, strict",
        _python(counters.IN_FLIGHT),
        _python(counters.ONE_IN_FLIGHT),
        is_strict=True,
    ),
    *(
        _Bomb(f"endless {name}", BOMBS[name])
        for name in ("processes", "memory", "disk", "processor", "output", "refused connections")
    ),
)


async def attacks() -> AsyncIterator[Finding]:
    """Make every attack on every backend."""
    for backend in BACKENDS:
        try:
            async with firing_range(backend, {"isolation": ISOLATION}) as area:
                for bomb in _BOMBS:
                    if not bomb.is_strict or backend in _RUNC:
                        yield await _explode(area, bomb)
        except RuntimeError as error:
            yield Finding("counters", backend, None, str(error).splitlines()[-1])


async def _explode(area: Range, bomb: _Bomb) -> Finding:
    options = {"sandbox": _STRICT} if bomb.is_strict else {}

    async def attack() -> Outcome:
        observation = await area.run_inside(bomb.command, HOLD_S, **options)
        return Outcome(True, _summary(observation))

    return await area.measure(
        bomb.name,
        attack,
        command=bomb.neighbour,
        neighbour_options=options,
        bounds=SHARED,
        is_known_gap=area.backend in bomb.gap_on,
    )


def _summary(observation: str) -> str:
    """Return the amount that the program printed, or how its sandbox or the command ended."""
    lines = observation.splitlines() or [""]
    amounts = [line for line in lines if line.isdigit() or line == "ready"]
    if "Everything in the sandbox is lost" in observation:
        return f"sandbox lost ({lines[0][-70:]}),"
    return f"took {amounts[-1]}," if amounts else f"{lines[0][:40]},"
