"""What sandboxes there are: each from before the backend is asked for it until after its end."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from enum import StrEnum, auto

from policies.isolation import Isolation
from policies.pool import Load, Recipe
from sandbox_runtime.guest_sandbox import GuestSandbox


class State(StrEnum):
    """Where a sandbox is between its beginning and its end."""

    STARTING = auto()
    IDLE = auto()
    LENT = auto()
    ENDING = auto()


class Place:
    """One sandbox in the books, made or about to be."""

    def __init__(self, isolation: Isolation, recipe: Recipe) -> None:
        self.made = isolation
        self.recipe = recipe
        self.fingerprint: str | None = None
        """What it is made from."""
        self.ready_at = 0.0
        """By the pool's clock."""
        self.counted = isolation
        """What it may use, now that it is lent to somebody."""
        self.lent_since: float | None = None
        """From when on somebody can use it."""
        self.is_unused = True
        """Whether it is as it was made; else it is nobody else's any more."""
        self.at_end = AsyncExitStack()
        """What is undone at its end."""
        self._sandbox: GuestSandbox | None = None

    @property
    def sandbox(self) -> GuestSandbox:
        """The sandbox; there once it has started."""
        assert self._sandbox is not None
        return self._sandbox

    @sandbox.setter
    def sandbox(self, sandbox: GuestSandbox) -> None:
        self._sandbox = sandbox
        self.at_end.push_async_callback(sandbox.close)

    @property
    def load(self) -> Load:
        """What it takes of what there may be."""
        return Load(1, self.counted.memory_mib)


class Books:
    """All places, in each state the longest there first."""

    def __init__(self) -> None:
        self._places: dict[State, dict[Place, None]] = {state: {} for state in State}
        self._states: dict[Place, State] = {}
        self._load = Load()

    @property
    def load(self) -> Load:
        """Of all of them together."""
        return self._load

    def enter(self, place: Place) -> None:
        """Take one in, before it is started."""
        self._states[place] = State.STARTING
        self._places[State.STARTING][place] = None
        self._load += place.load

    def move(self, place: Place, state: State) -> None:
        """Note that it has come to another state."""
        del self._places[self._states[place]][place]
        self._states[place] = state
        self._places[state][place] = None

    def count(self, place: Place, isolation: Isolation) -> None:
        """Count it as one of that isolation from now on."""
        self._load -= place.load
        place.counted = isolation
        self._load += place.load

    def strike(self, place: Place) -> None:
        """Forget it: nothing is left of it."""
        del self._places[self._states.pop(place)][place]
        self._load -= place.load

    def state(self, place: Place) -> State | None:
        """Where it is; None: nowhere any more."""
        return self._states.get(place)

    def all(self, state: State) -> list[Place]:
        """Those in that state."""
        return list(self._places[state])

    def of(self, state: State, recipe: Recipe) -> Iterator[Place]:
        """Those in that state made by that recipe."""
        return (place for place in self._places[state] if place.recipe == recipe)

    def number(self, state: State) -> int:
        """How many are in that state."""
        return len(self._places[state])

    def __len__(self) -> int:
        return len(self._states)
