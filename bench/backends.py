"""The backends of this project that work on this machine."""

import tempfile
from collections.abc import AsyncIterator, Callable
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
from sandbox_runtime.guest_sandbox import start_sandbox

Kind = Literal["docker", "bubblewrap"]
KINDS: tuple[Kind, ...] = ("docker", "bubblewrap")


@dataclass(frozen=True, slots=True)
class BenchBackend:
    """A backend under test."""

    kind: Kind
    backend: Backend = field(compare=False)

    @property
    def name(self) -> str:
        """The name in the rows of the table."""
        return self.kind


@dataclass(frozen=True, slots=True)
class BenchBackends:
    """The working backends, and the reasons why the others do not work."""

    working: list[BenchBackend]
    missing_rows: list[Row]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of the working backends."""
        return [backend.kind for backend in self.working]


def make_backend(kind: Kind, *, image: str, state_dir: Path) -> Backend:
    """Return a backend of this kind. Raises SandboxStartError."""
    makers: dict[Kind, Callable[[], Backend]] = {
        "docker": lambda: DockerBackend(image, state_dir=state_dir),
        "bubblewrap": lambda: BubblewrapBackend(state_dir=state_dir),
    }
    return makers[kind]()


@asynccontextmanager
async def working_backends(image: str) -> AsyncIterator[BenchBackends]:
    """Yield the working backends, in a temporary state directory."""
    found = BenchBackends([], [])
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for kind in KINDS:
            await _add_backend(found, kind, image, Path(directory))
        try:
            yield found
        finally:
            for backend in found.working:
                await backend.backend.aclose()


async def _add_backend(backends: BenchBackends, kind: Kind, image: str, state_dir: Path) -> None:
    async with AsyncExitStack() as undo:
        try:
            backend = make_backend(kind, image=image, state_dir=state_dir)
            undo.push_async_callback(backend.aclose)
            broken = [check.detail for check in await backend.check() if not check.ok]
            if broken:
                raise SandboxStartError("; ".join(broken))
            await (await start_sandbox(backend, Isolation())).close()
        except SandboxStartError as error:
            backends.missing_rows.append(Row(kind, note=str(error)))
        else:
            backends.working.append(BenchBackend(kind, backend))
            undo.pop_all()
