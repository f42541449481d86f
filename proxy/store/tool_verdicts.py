"""Stored verdicts on the tool support of models."""

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, delete, select

from policies.tool_support import KnownVerdict, ToolVerdict
from proxy.store.database import Database, upsert
from proxy.store.tables import TOOL_VERDICTS

KEEP_S = 30 * 24 * 3600
MAX_MODELS = 1024
"""Maximum number of verdicts of one backend that are read, the newest first."""


class ToolVerdictRepository:
    """Stores one verdict per backend and model. A backend is identified by its address."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def all(self, backend: str) -> dict[str, KnownVerdict]:
        """Return the verdicts on a backend's models, by model."""
        table = TOOL_VERDICTS.c
        query = select(TOOL_VERDICTS).where(table.backend == backend)
        query = query.order_by(table.found_at.desc()).limit(MAX_MODELS)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {
            row.model: KnownVerdict(ToolVerdict(row.reason, row.words), row.version, row.found_at)
            for row in reversed(rows)
        }

    async def save(self, backend: str, model: str, known_verdict: KnownVerdict) -> None:
        """Store a verdict in place of an older verdict on the same model."""
        row: Mapping[str, object] = {
            "backend": backend,
            "model": model,
            "reason": known_verdict.verdict.reason,
            "words": known_verdict.verdict.message,
            "version": known_verdict.version,
            "found_at": known_verdict.found_at,
        }

        def transaction(connection: Connection) -> None:
            change = upsert(connection, TOOL_VERDICTS).values(row)
            change = change.on_conflict_do_update(index_elements=["backend", "model"], set_=row)
            connection.execute(change)

        await self._database.write(transaction)

    async def delete(self, backend: str, model: str) -> None:
        """Delete the verdict on a model, if there is one."""
        table = TOOL_VERDICTS.c
        change = delete(TOOL_VERDICTS).where(table.backend == backend, table.model == model)
        await self._database.write(lambda connection: connection.execute(change))

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete verdicts that no probe has confirmed for `KEEP_S` seconds. See Repository."""
        connection.execute(delete(TOOL_VERDICTS).where(TOOL_VERDICTS.c.found_at < now - KEEP_S))
        return False
