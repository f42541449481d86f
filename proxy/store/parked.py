"""Runs that wait for their clients."""

import json
from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, select

from proxy.agent.parking import Parked
from proxy.store.database import Database, is_full, oldest
from proxy.store.quota import oldest_beyond
from proxy.store.tables import PARKED_RUNS

KEEP_S = 7 * 24 * 3600
"""How long a client may take to run its tools."""
MAX_RUNS = 256
MAX_BYTES = 64_000_000
"""How many of one owner wait, and how large they are together; beyond that the oldest goes."""


class ParkedShelf:
    """See `ParkedRuns`."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def save(self, owner: str, parked: Parked) -> None:
        record = json.dumps(parked.to_json())
        row = {
            "owner": owner,
            "name": parked.name,
            "record": record,
            "bytes": len(record),
            "expires_at": int(self._now()) + KEEP_S,
        }

        same = (PARKED_RUNS.c.owner == owner) & (PARKED_RUNS.c.name == parked.name)

        def work(connection: Connection) -> None:
            connection.execute(delete(PARKED_RUNS).where(same))
            connection.execute(insert(PARKED_RUNS), row)
            connection.execute(
                oldest_beyond(PARKED_RUNS, owner, max_rows=MAX_RUNS, max_bytes=MAX_BYTES)
            )

        await self._database.write(work)

    async def find(self, owner: str, name: str) -> Parked | None:
        query = select(PARKED_RUNS.c.record).where(
            PARKED_RUNS.c.owner == owner,
            PARKED_RUNS.c.name == name,
            PARKED_RUNS.c.expires_at > self._now(),
        )
        record = await self._database.read(lambda c: c.execute(query).scalar_one_or_none())
        return Parked.from_json(json.loads(record)) if record else None

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete what is past its time."""
        past = oldest(PARKED_RUNS, PARKED_RUNS.c.expires_at <= now)
        return is_full(connection, delete(PARKED_RUNS).where(PARKED_RUNS.c.seq.in_(past)))
