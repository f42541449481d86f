"""Snapshots in memory."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from policies.sessions import Session, SessionState
from sandbox_runtime.errors import FileMissingError
from sandbox_runtime.sandbox import Sink


class MemorySnapshots:
    """A snapshot store without limits."""

    def __init__(self) -> None:
        self.kept: dict[Session, dict[str, bytes]] = {}
        self.made: list[SessionState] = []
        """The saved states, in order."""

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        pieces: list[bytes] = []

        async def take(piece: bytes) -> None:
            pieces.append(piece)

        await write(take)
        self.made.append(state)
        self._keep(state, b"".join(pieces))

    async def alias(self, state: SessionState, target: SessionState) -> None:
        data = self.kept.get(target.session, {}).get(target.name)
        if data is not None:
            self._keep(state, data)

    async def newest_state_name(self, session: Session) -> str | None:
        return next(reversed(self.kept.get(session, {})), None)

    async def stored_names(self, session: Session, names: Sequence[str]) -> set[str]:
        return set(names) & self.kept.get(session, {}).keys()

    async def read(self, state: SessionState) -> AsyncIterator[bytes]:
        try:
            data = self.kept[state.session][state.name]
        except KeyError as error:
            raise FileMissingError(f"state {state.name!r} is kept no more") from error
        yield data

    async def discard(self, session: Session) -> None:
        self.kept.pop(session, None)

    def _keep(self, state: SessionState, data: bytes) -> None:
        states = self.kept.setdefault(state.session, {})
        states.pop(state.name, None)  # what is kept again is the newest
        states[state.name] = data
