"""Responses that clients may ask for again, or go on from."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, insert, literal, select, update

from policies.storage import ResponseSettings
from proxy.store import items
from proxy.store.conversations import append
from proxy.store.database import Database
from proxy.store.items import Item
from proxy.store.records import Chain, StoredResponse
from proxy.store.tables import CONVERSATIONS, ITEMS, RESPONSES

MAX_CHAIN = 1000
"""How many responses one may go on from, each from the one before."""


class ResponseShelf:
    """Everybody's responses; each owner sees its own."""

    def __init__(
        self, database: Database, now: Callable[[], float], settings: ResponseSettings
    ) -> None:
        self._database = database
        self._now = now
        self.settings = settings

    async def begin(
        self, owner: str, response: StoredResponse, inputs: Sequence[Item], chain: Sequence[str]
    ) -> None:
        """Keep one that is being made; what it goes on from, `chain`, lives its time again."""
        now = int(self._now())
        until = self.settings.expiry(now)
        record = json.dumps(response.record)
        row = {
            **{name: getattr(response, name) for name in StoredResponse.__slots__},
            "owner": owner,
            "record": record,
            "created_at": now,
            "expires_at": until,
        }

        def work(connection: Connection) -> None:
            size = items.add(connection, owner, response.id, inputs, "input")
            connection.execute(insert(RESPONSES), {**row, "bytes": size + len(record)})
            for table, ids in ((RESPONSES, chain), (CONVERSATIONS, [response.conversation_id])):
                used = update(table).where(table.c.id.in_(ids), table.c.owner == owner)
                connection.execute(used.values(expires_at=until))
            items.make_room(connection, owner, self.settings.quota_mib << 20, response.id)

        await self._database.write(work)

    async def end(self, owner: str, response_id: str, record: Mapping[str, Any]) -> None:
        """Keep what became of one, unless it was deleted meanwhile; its conversation has its
        items if it came to an end of its own."""
        output = record["output"]
        written = json.dumps({**record, "output": []})
        change = (
            update(RESPONSES)
            .where(RESPONSES.c.owner == owner, RESPONSES.c.id == response_id)
            .values(record=written, worker=None)
            .returning(RESPONSES.c.conversation_id)
        )

        def work(connection: Connection) -> None:
            row = connection.execute(change).one_or_none()
            if row is None:
                return
            before = items.of(connection, response_id)
            size = items.add(connection, owner, response_id, output, "output")
            grown = update(RESPONSES).where(RESPONSES.c.id == response_id)
            connection.execute(grown.values(bytes=RESPONSES.c.bytes + size + len(written)))
            if row.conversation_id and record["status"] in ("completed", "incomplete"):
                append(connection, owner, row.conversation_id, [*before, *output])
            items.make_room(connection, owner, self.settings.quota_mib << 20, response_id)

        await self._database.write(work)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The owner's response, or None."""
        query = select(RESPONSES).where(self._mine(owner), RESPONSES.c.id == response_id)

        def work(connection: Connection) -> StoredResponse | None:
            row = connection.execute(query).mappings().one_or_none()
            return _response(connection, row) if row else None

        return await self._database.read(work)

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        """The owner's response with all that was before it, or None. One that has more than
        MAX_CHAIN before it is shown without the oldest."""
        mine = self._mine(owner)
        first = select(RESPONSES.c.id, RESPONSES.c.previous_id, literal(0).label("depth"))
        line = first.where(mine, RESPONSES.c.id == response_id).cte(recursive=True)
        before = select(RESPONSES.c.id, RESPONSES.c.previous_id, line.c.depth + 1)
        line = line.union_all(
            before.where(mine, RESPONSES.c.id == line.c.previous_id, line.c.depth < MAX_CHAIN)
        )
        query = select(RESPONSES).join(line, line.c.id == RESPONSES.c.id).order_by(line.c.depth)

        def work(connection: Connection) -> Chain | None:
            rows = connection.execute(query).mappings().all()
            if not rows:
                return None
            before = (item for row in reversed(rows[1:]) for item in _said(connection, row))
            inputs = _said(connection, rows[0], ITEMS.c.source == "input")
            latest = _response(connection, rows[0])
            states = (row["state"] for row in rows if row["session"] == latest.session)
            ids = tuple(row["id"] for row in rows)
            return Chain(latest, ids, tuple(states), (*before, *inputs))

        return await self._database.read(work)

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """The owner's items of those names."""
        return await self._database.read(lambda c: items.named(c, owner, ids))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response and its items; whether there was one."""
        query = select(RESPONSES.c.id).where(self._mine(owner), RESPONSES.c.id == response_id)

        def work(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            items.discard(connection, RESPONSES, found)
            return bool(found)

        return await self._database.write(work)

    def expire(self, connection: Connection, now: int, forget_before: int) -> None:
        """Delete what is past its time."""
        past = select(RESPONSES.c.id).where(RESPONSES.c.expires_at <= now)
        items.discard(connection, RESPONSES, connection.execute(past).scalars().all())

    def blobs(self, connection: Connection) -> dict[str, int]:
        """None of it lies in a blob."""
        return {}

    def lose(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Nothing of it can be lost so."""

    def _mine(self, owner: str) -> ColumnElement[bool]:
        return (RESPONSES.c.owner == owner) & (RESPONSES.c.expires_at > self._now())


def _response(connection: Connection, row: RowMapping) -> StoredResponse:
    fields = {name: row[name] for name in StoredResponse.__slots__}
    output = items.of(connection, row["id"], ITEMS.c.source == "output")
    return StoredResponse(**{**fields, "record": {**json.loads(row["record"]), "output": output}})


def _said(connection: Connection, row: RowMapping, *which: ColumnElement[bool]) -> list[Item]:
    """What a response adds to what it goes on from: a conversation as it stood, and its own."""
    own = items.of(connection, row["id"], *which)
    if not row["conversation_id"]:
        return own
    stood = items.of(connection, row["conversation_id"], ITEMS.c.seq <= row["seen_seq"])
    return [*stood, *own]
