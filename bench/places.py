"""The isolated places of this machine that are ours: each backend with each agent inside."""

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.table import Row
from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.lending import start_sandbox

Kind = Literal["docker", "bubblewrap"]
Agent = Literal["native", "python"]
KINDS: tuple[Kind, ...] = ("docker", "bubblewrap")
AGENTS: tuple[Agent, ...] = ("native", "python")


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere a sandbox can be."""

    kind: Kind
    agent: Agent
    backend: Backend = field(compare=False)

    @property
    def name(self) -> str:
        """As rows of tables call it."""
        return place_name(self.kind, self.agent)


@dataclass(frozen=True, slots=True)
class Places:
    """Those that work here, and why the others do not."""

    found: list[Place]
    missing: list[Row]

    @property
    def kinds(self) -> list[Kind]:
        """The backends that work, whatever the agent."""
        return [kind for kind in KINDS if any(place.kind == kind for place in self.found)]


def place_name(kind: Kind, agent: Agent) -> str:
    """As rows of tables call it."""
    return f"{kind}, {agent}"


def make_backend(kind: Kind, agent: Agent, *, image: str, state_dir: Path) -> Backend:
    """One with this agent and no other. Raises SandboxStartError."""
    makers: dict[Kind, Callable[[], Backend]] = {
        "docker": lambda: DockerBackend(image, state_dir=state_dir, agent=agent),
        "bubblewrap": lambda: BubblewrapBackend(state_dir=state_dir, agent=agent),
    }
    return makers[kind]()


@asynccontextmanager
async def places(image: str, agents: Sequence[Agent] = AGENTS) -> AsyncIterator[Places]:
    """Every backend, with a state directory of its own."""
    found = Places([], [])
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for kind in KINDS:
            for agent in agents:
                await _add(found, kind, agent, image, Path(directory))
        try:
            yield found
        finally:
            for place in found.found:
                await place.backend.aclose()


async def _add(found: Places, kind: Kind, agent: Agent, image: str, state_dir: Path) -> None:
    async with AsyncExitStack() as undo:
        try:
            backend = make_backend(kind, agent, image=image, state_dir=state_dir)
            undo.push_async_callback(backend.aclose)
            broken = [check.detail for check in await backend.check() if not check.ok]
            if broken:
                raise SandboxStartError("; ".join(broken))
            await (await start_sandbox(backend, Isolation())).close()
        except SandboxStartError as error:
            found.missing.append(Row(place_name(kind, agent), note=str(error)))
        else:
            found.found.append(Place(kind, agent, backend))
            undo.pop_all()
