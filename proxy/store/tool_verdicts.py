"""Stored verdicts on the tool support of models, and the default instructions of their chat
templates."""

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, delete, select

from policies.tool_support import KnownVerdict, ToolVerdict
from proxy.store.database import Database, upsert
from proxy.store.tables import DEFAULT_INSTRUCTIONS, TOOL_VERDICTS

KEEP_S = 30 * 24 * 3600
MAX_MODELS = 1024
"""Maximum number of verdicts of one backend that are read, the newest first."""


class ToolVerdictRepository:
    """Stores one verdict and one default instruction per backend and model. A backend is identified
    by its address."""

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

    async def default_instructions(self, backend: str) -> dict[str, str]:
        """Return the default instructions of a backend's models, by model."""
        table = DEFAULT_INSTRUCTIONS.c
        query = select(DEFAULT_INSTRUCTIONS).where(table.backend == backend)
        query = query.order_by(table.found_at.desc()).limit(MAX_MODELS)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.model: row.instruction for row in reversed(rows)}

    async def save_default_instruction(self, backend: str, model: str, instruction: str) -> None:
        """Store a model's default instruction in place of an older one. Delete the older one if
        `instruction` is empty."""
        row = {"backend": backend, "model": model, "instruction": instruction}
        row_with_time: Mapping[str, object] = {**row, "found_at": self._now()}
        table = DEFAULT_INSTRUCTIONS.c

        def transaction(connection: Connection) -> None:
            if not instruction:
                where = (table.backend == backend, table.model == model)
                connection.execute(delete(DEFAULT_INSTRUCTIONS).where(*where))
                return
            change = upsert(connection, DEFAULT_INSTRUCTIONS).values(row_with_time)
            keys = ["backend", "model"]
            connection.execute(
                change.on_conflict_do_update(index_elements=keys, set_=row_with_time)
            )

        await self._database.write(transaction)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete verdicts and default instructions that were stored `KEEP_S` seconds ago. See
        Repository."""
        for table in (TOOL_VERDICTS, DEFAULT_INSTRUCTIONS):
            connection.execute(delete(table).where(table.c.found_at < now - KEEP_S))
        return False
