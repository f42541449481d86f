"""Stored verdicts on the tool support of models, and the default instructions of their chat
templates."""

from collections.abc import Mapping

from sqlalchemy import Connection, Table, delete, select

from policies.default_instruction import KnownInstruction
from policies.tool_support import KnownVerdict, ToolVerdict
from proxy.store.database import Database, upsert
from proxy.store.tables import DEFAULT_INSTRUCTIONS, TOOL_VERDICTS

KEEP_S = 30 * 24 * 3600
MAX_MODELS = 1024
"""Maximum number of verdicts, and of default instructions, of one backend that are read, the newest
first."""


class ToolVerdictRepository:
    """Stores one verdict and one default instruction per backend and model. A backend is identified
    by its address."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        await self._save(TOOL_VERDICTS, row)

    async def delete(self, backend: str, model: str) -> None:
        """Delete the verdict on a model, if there is one."""
        await self._delete(TOOL_VERDICTS, backend, model)

    async def default_instructions(self, backend: str) -> dict[str, KnownInstruction]:
        """Return the default instructions of a backend's models, by model."""
        table = DEFAULT_INSTRUCTIONS.c
        query = select(DEFAULT_INSTRUCTIONS).where(table.backend == backend)
        query = query.order_by(table.found_at.desc()).limit(MAX_MODELS)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {
            row.model: KnownInstruction(row.instruction, row.found_at) for row in reversed(rows)
        }

    async def save_default_instruction(
        self, backend: str, model: str, known_instruction: KnownInstruction
    ) -> None:
        """Store a model's default instruction in place of an older one."""
        row: Mapping[str, object] = {
            "backend": backend,
            "model": model,
            "instruction": known_instruction.text,
            "found_at": known_instruction.found_at,
        }
        await self._save(DEFAULT_INSTRUCTIONS, row)

    async def delete_default_instruction(self, backend: str, model: str) -> None:
        """Delete the default instruction of a model, if there is one."""
        await self._delete(DEFAULT_INSTRUCTIONS, backend, model)

    async def _save(self, table: Table, row: Mapping[str, object]) -> None:
        def transaction(connection: Connection) -> None:
            change = upsert(connection, table).values(row)
            change = change.on_conflict_do_update(index_elements=["backend", "model"], set_=row)
            connection.execute(change)

        await self._database.write(transaction)

    async def _delete(self, table: Table, backend: str, model: str) -> None:
        change = delete(table).where(table.c.backend == backend, table.c.model == model)
        await self._database.write(lambda connection: connection.execute(change))

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete verdicts and default instructions that are older than `KEEP_S` seconds. See
        Repository."""
        for table in (TOOL_VERDICTS, DEFAULT_INSTRUCTIONS):
            connection.execute(delete(table).where(table.c.found_at < now - KEEP_S))
        return False
