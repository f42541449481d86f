"""Which models are given tools, as it was found out: known again after a restart."""

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from policies.tool_support import KnownVerdict, ToolVerdict
from proxy.store.database import Database
from proxy.store.tables import TOOL_VERDICTS

KEEP_S = 30 * 24 * 3600
MAX_MODELS = 1024
"""Of one backend; of more the oldest verdicts are not read again."""


class ToolVerdictShelf:
    """A row for each backend, by its address, and model."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def all(self, backend: str) -> dict[str, KnownVerdict]:
        """The verdicts on a backend's models, by their names."""
        table = TOOL_VERDICTS.c
        newest_first = select(TOOL_VERDICTS).where(table.backend == backend)
        query = newest_first.order_by(table.found_at.desc()).limit(MAX_MODELS)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {
            row.model: KnownVerdict(ToolVerdict(row.reason, row.words), row.version, row.found_at)
            for row in reversed(rows)
        }

    async def save(self, backend: str, model: str, known: KnownVerdict) -> None:
        """Keep a verdict in the place of an older one."""
        row: Mapping[str, object] = {
            "backend": backend,
            "model": model,
            "reason": known.verdict.reason,
            "words": known.verdict.words,
            "version": known.version,
            "found_at": known.found_at,
        }
        new = insert(TOOL_VERDICTS).values(row)
        saved = new.on_conflict_do_update(index_elements=["backend", "model"], set_=row)
        await self._database.write(lambda connection: connection.execute(saved))

    async def forget(self, backend: str, model: str) -> None:
        """Delete the verdict on a model, if there is one."""
        table = TOOL_VERDICTS.c
        query = delete(TOOL_VERDICTS).where(table.backend == backend, table.model == model)
        await self._database.write(lambda connection: connection.execute(query))

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete verdicts that nobody has confirmed for long."""
        connection.execute(delete(TOOL_VERDICTS).where(TOOL_VERDICTS.c.found_at < now - KEEP_S))
        return False  # a row for each model
