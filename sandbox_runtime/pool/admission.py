"""Who gets which sandbox, who waits, and what is started and ended for that.

One queue for all: whatever becomes ready goes to the first who can use it. Who needs room that is
not there holds up everybody behind, so nobody is overtaken for ever.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolSettings,
    Recipe,
    fits,
    how_many_to_end,
    recipe,
    starts_ahead,
    starts_at_once,
    unbound,
)
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.pool.books import Books, Place, State
from sandbox_runtime.pool.claim import Claim
from sandbox_runtime.pool.endings import Endings
from sandbox_runtime.pool.supply import Supply

logger = logging.getLogger(__name__)

OnFull = Callable[[Callable[[], bool]], None]
"""Told whenever somebody waits for room that nobody is about to make; and how to find out later
whether that is still so."""


class Admission:
    """The queue, and what is done about it. `kept` are the isolations that warm ones are for."""

    def __init__(
        self,
        settings: PoolSettings,
        kept: Sequence[Isolation],
        books: Books,
        supply: Supply,
        endings: Endings,
        *,
        cores: int,
    ) -> None:
        self.waiting = deque[Claim]()
        self._settings = settings
        self._kept = {recipe(isolation): unbound(isolation) for isolation in kept}
        self._books = books
        self._supply = supply
        self._endings = endings
        self._cores = cores
        self._is_closed = False
        self.on_full: OnFull | None = None

    def enter(self, claim: Claim) -> str | None:
        """Queue up. Returns why, where the claim is neither served nor allowed to wait."""
        self.waiting.append(claim)
        return self._seat(claim)

    def enter_first(self, claim: Claim) -> str | None:
        """The same before all others, for who was served badly."""
        self.waiting.appendleft(claim)
        return self._seat(claim)

    def _seat(self, claim: Claim) -> str | None:
        self.serve()
        why = None if claim.place else self._why_not_wait(claim)
        if why:
            self.waiting.remove(claim)
        return why

    def _why_not_wait(self, claim: Claim) -> str | None:
        if self._is_closed:
            return "the pool is closed"
        if self._settings.on_miss == "fail":
            return "no sandbox is ready"
        queue = [each for each in self.waiting if not each.is_coming]
        if claim in queue and len(queue) > self._settings.max_waiting:
            return f"{len(queue) - 1} requests wait for a sandbox already"
        return None

    def leave(self, claim: Claim) -> None:
        """It wants none any more."""
        if claim in self.waiting:
            self.waiting.remove(claim)
        self.serve()

    def shelve(self, place: Place) -> None:
        """One that nobody has used is there."""
        if place.fingerprint == self._supply.fingerprint and not self._is_closed:
            place.lent_since = None
            self._books.count(place, place.made)
            self._books.move(place, State.IDLE)
        else:
            self._endings.begin(place)
        self.serve()

    def tell(self, place: Place, error: BaseException) -> None:
        """One could not be started: whoever counted on it hears why."""
        if self._is_closed:
            return
        counting = [claim for claim in self.waiting if claim.recipe == place.recipe]
        if len(counting) > len(list(self._books.of(State.STARTING, place.recipe))):
            self.waiting.remove(counting[0])
            counting[0].fail(error)
        elif isinstance(error, SandboxError):
            logger.warning("no sandbox could be made ready: %s", error)
        else:
            logger.error("no sandbox could be made ready", exc_info=error)
        self.serve()

    def close(self) -> list[Claim]:
        """Lend, start and keep nothing any more. Returns who waited in vain."""
        self._is_closed = True
        for place in self._books.all(State.IDLE):
            self._endings.begin(place)
        in_vain, self.waiting = list(self.waiting), deque()
        return in_vain

    def serve(self) -> None:
        """Do what can be done now: lend and start for who waits, in turn, then fill up."""
        if self._is_closed:
            return
        starting = Counter(place.recipe for place in self._books.all(State.STARTING))
        is_full = False
        for claim in tuple(self.waiting):
            claim.is_coming = False
            is_full = is_full or not self._serve(claim, starting)
        if is_full and self.on_full and self._is_short():
            self.on_full(self._is_short)
        self._trim()
        # A start takes the processor for a moment: who is being lent one goes first.
        is_lending = any(place.lent_since is None for place in self._books.all(State.LENT))
        if not (is_full or is_lending or self._supply.is_resting):
            self._fill(starting)

    def _is_short(self) -> bool:
        """Whether more wait than there are sandboxes that end."""
        ending = self._books.number(State.ENDING)
        return sum(not claim.is_coming for claim in self.waiting) > ending

    def _serve(self, claim: Claim, starting: Counter[Recipe]) -> bool:
        """Lend to the claim or have one started for it; False: there is no room.

        `starting` are the starts that nobody before this claim counts on.
        """
        if idle := next(self._books.of(State.IDLE, claim.recipe), None):
            return self._lend(idle, claim)
        if not starting[claim.recipe]:
            if not self._may_start():
                return True
            if not self._make_room(Load(1, claim.isolation.memory_mib)):
                return False
            self._supply.start(claim.isolation, claim.recipe)
            starting[claim.recipe] += 1
        starting[claim.recipe] -= 1
        claim.is_coming = True
        return True

    def _may_start(self) -> bool:
        """Whether one may be started because somebody waits for it."""
        starting = self._books.number(State.STARTING)
        return starting < starts_at_once(self._settings, self._cores)

    def _may_fill(self, isolation: Isolation) -> bool:
        few = self._books.number(State.STARTING) < starts_ahead(self._cores)
        return few and fits(self._settings, self._books.load + Load(1, isolation.memory_mib))

    def _lend(self, place: Place, claim: Claim) -> bool:
        more_mib = claim.isolation.memory_mib - place.counted.memory_mib
        if not self._make_room(Load(0, more_mib), besides=place):
            return False
        self.waiting.remove(claim)
        self._books.move(place, State.LENT)
        if more_mib > 0:
            self._books.count(place, claim.isolation)
        claim.give(place)
        return True

    def _make_room(self, needed: Load, besides: Place | None = None) -> bool:
        """Whether there is room now; where there is none, idle ones end if that will make it."""
        if fits(self._settings, self._books.load + needed):
            return True
        ending = sum((place.load for place in self._books.all(State.ENDING)), Load())
        idle = [place for place in self._books.all(State.IDLE) if place is not besides]
        number = how_many_to_end(
            self._settings, self._books.load - ending + needed, [place.load for place in idle]
        )
        for place in idle[: number or 0]:
            self._endings.begin(place)
        return False

    def _trim(self) -> None:
        """End what is idle and not as it is kept, or one too many: of these the oldest."""
        kept = Counter(dict.fromkeys(self._kept, self._settings.idle))
        for place in reversed(self._books.all(State.IDLE)):
            if place.made == self._kept.get(place.recipe) and kept[place.recipe]:
                kept[place.recipe] -= 1
            else:
                self._endings.begin(place)

    def _fill(self, starting: Counter[Recipe]) -> None:
        """Start what is missing of those kept ready, few at a time. Whoever has one lent may leave
        without having used it."""
        places = (*self._books.all(State.IDLE), *self._books.all(State.LENT))
        unused = Counter(place.recipe for place in places if place.is_unused)
        for each, isolation in self._kept.items():
            for _ in range(self._settings.idle - unused[each] - starting[each]):
                if self._may_fill(isolation):
                    self._supply.start(isolation, each)
