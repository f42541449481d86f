"""Observations kept whole inside the sandbox, for a model whose context has no room for them."""

from collections.abc import AsyncIterator, Awaitable, Callable

from policies.workspace import OBSERVATION_DIR
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

KEEP_S = 10.0
"""How long one may take to be written."""


class ObservationFiles:
    """Those of one run; `computer` gives its sandbox, where it has one."""

    def __init__(self, run_id: str, computer: Callable[[], Awaitable[Sandbox | None]]) -> None:
        # Runs of a conversation share the sandbox; ids made from time begin alike.
        self._name = run_id[-8:]
        self._computer = computer
        self._count = 0

    async def keep(self, text: str) -> str | None:
        """Write a text whole; gives its path, or None where it could not be written."""
        computer = await self._computer()
        if computer is None:
            return None
        self._count += 1
        path = f"{OBSERVATION_DIR}/{self._name}-{self._count}.txt"

        async def written() -> AsyncIterator[bytes]:
            yield text.encode(errors="replace")

        try:
            await computer.put(path, written(), timeout_s=KEEP_S)
        except (SandboxFileError, SandboxLostError):
            return None
        return path
