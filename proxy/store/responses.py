"""Stored responses, which clients retrieve and continue, and which of the backend's are whose."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Table,
    delete,
    insert,
    literal,
    select,
    update,
)

from policies.sessions import ResponseSettings
from proxy.store.conversations import (
    Item,
    ResponseQuota,
    add_items,
    append_to_conversation,
    delete_holders,
    expire_holders,
    get_items,
    items_by_holder,
    list_items,
)
from proxy.store.database import Database, oldest_rows, sweep_batch
from proxy.store.records import ResponseChain, StoredResponse
from proxy.store.tables import BACKEND_RESPONSES, CONVERSATIONS, ITEMS, RESPONSES, STREAMS

MAX_CHAIN = 1000
"""The most responses before one, linked by `previous_response_id`."""
MAX_BACKEND_RESPONSES = 10_000
"""The most responses kept by the backend that are noted for one owner; beyond that the oldest
goes."""
EXPIRY_SLACK_S = 60
"""An expiry that is this little earlier is not worth a write."""


class ResponseRepository:
    """The responses of all owners; each owner sees its own only."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float],
        settings: ResponseSettings,
        quota: ResponseQuota,
    ) -> None:
        self._database = database
        self._now = now
        self.settings = settings
        self._quota = quota

    async def begin(
        self, owner: str, response: StoredResponse, inputs: Sequence[Item], chain: Sequence[str]
    ) -> None:
        """Keep a response that begins, and extend the life of `chain`, the responses before it."""
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

        before: list[tuple[Table, Sequence[str]]] = [(RESPONSES, chain)] if chain else []
        if response.conversation_id:
            before.append((CONVERSATIONS, [response.conversation_id]))

        def work(connection: Connection) -> None:
            size = len(record) + add_items(connection, owner, response.id, inputs)
            connection.execute(insert(RESPONSES), {**row, "bytes": size})
            for table, ids in before:
                used = update(table).where(table.c.id.in_(ids), table.c.owner == owner)
                used = used.where(table.c.expires_at < until - EXPIRY_SLACK_S)
                connection.execute(used.values(expires_at=until))
            self._quota.charge(connection, owner, size, response.id)

        await self._database.write(work)

    async def end(
        self, owner: str, response_id: str, record: Mapping[str, Any], frames: str | None = None
    ) -> None:
        """Keep the final response and its stream, unless it was deleted meanwhile. Its items join
        its conversation if it was completed or is incomplete."""
        output = record["output"]
        written = json.dumps({**record, "output": []})
        this = (RESPONSES.c.owner == owner) & (RESPONSES.c.id == response_id)
        query = select(RESPONSES.c.conversation_id).where(this)
        change = update(RESPONSES).where(this).values(record=written, worker=None)

        def work(connection: Connection) -> None:
            row = connection.execute(query).one_or_none()
            if row is None:
                return
            size = len(written) + len(frames or "")
            size += add_items(connection, owner, response_id, output, "output")
            connection.execute(change.values(bytes=RESPONSES.c.bytes + size))
            if frames:
                stream = {"response_id": response_id, "frames": frames}
                connection.execute(insert(STREAMS), stream)
            if row.conversation_id and record["status"] in ("completed", "incomplete"):
                said = list_items(connection, response_id)
                size += append_to_conversation(connection, owner, row.conversation_id, said)
            self._quota.charge(connection, owner, size, response_id)

        await self._database.write(work)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response, or None."""
        query = select(RESPONSES).where(self._mine(owner), RESPONSES.c.id == response_id)

        def work(connection: Connection) -> StoredResponse | None:
            row = connection.execute(query).mappings().one_or_none()
            return _response(connection, row) if row else None

        return await self._database.read(work)

    async def frames(self, owner: str, response_id: str) -> str | None:
        """Return the stream of a background response, as `end` got it, or None."""
        mine = select(RESPONSES.c.id).where(self._mine(owner), RESPONSES.c.id == response_id)
        query = select(STREAMS.c.frames).where(STREAMS.c.response_id.in_(mine))
        return await self._database.read(lambda c: c.execute(query).scalar_one_or_none())

    async def chain(self, owner: str, response_id: str) -> ResponseChain | None:
        """Return the owner's response with at most MAX_CHAIN responses before it, or None."""
        mine = self._mine(owner)
        first = select(RESPONSES.c.id, RESPONSES.c.previous_id, literal(0).label("depth"))
        line = first.where(mine, RESPONSES.c.id == response_id).cte(recursive=True)
        before = select(RESPONSES.c.id, RESPONSES.c.previous_id, line.c.depth + 1)
        line = line.union_all(
            before.where(mine, RESPONSES.c.id == line.c.previous_id, line.c.depth < MAX_CHAIN)
        )
        query = select(RESPONSES).join(line, line.c.id == RESPONSES.c.id).order_by(line.c.depth)

        def work(connection: Connection) -> ResponseChain | None:
            rows = connection.execute(query).mappings().all()
            if not rows:
                return None
            ids = tuple(row["id"] for row in rows)
            own = items_by_holder(connection, ids[1:])
            own[ids[0]] = list_items(connection, ids[0], ITEMS.c.source == "input")
            inputs = [
                item
                for row in reversed(rows)
                for item in (*_conversation_before(connection, row), *own[row["id"]])
            ]
            latest = _response(connection, rows[0])
            states = (row["state"] for row in rows if row["session"] == latest.session)
            return ResponseChain(latest, ids, tuple(states), tuple(inputs))

        return await self._database.read(work)

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """Return the owner's items with these ids."""
        return await self._database.read(lambda c: get_items(c, owner, ids))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and its items; return True if there was one."""
        query = select(RESPONSES.c.id).where(self._mine(owner), RESPONSES.c.id == response_id)

        def work(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            delete_holders(connection, RESPONSES, found)
            return bool(found)

        return await self._database.write(work)

    async def add_backend_response(self, owner: str, response_id: str) -> None:
        """Note that a response that the backend keeps belongs to the owner."""
        table, until = BACKEND_RESPONSES, self.settings.expiry(int(self._now()))
        row = {"owner": owner, "id": response_id, "expires_at": until}
        last = select(table.c.seq).where(table.c.owner == owner).order_by(table.c.seq.desc())
        beyond = last.limit(1).offset(MAX_BACKEND_RESPONSES).scalar_subquery()

        def work(connection: Connection) -> None:
            connection.execute(insert(table).prefix_with("OR REPLACE"), row)
            connection.execute(delete(table).where(table.c.owner == owner, table.c.seq <= beyond))

        await self._database.write(work)

    async def is_backend_response(self, owner: str, response_id: str) -> bool:
        """Return True if the backend keeps a response of that id for the owner."""
        table = BACKEND_RESPONSES.c
        mine = (table.owner == owner) & (table.id == response_id) & (table.expires_at > self._now())
        query = select(table.seq).where(mine)
        return await self._database.read(
            lambda connection: connection.execute(query).first() is not None
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired responses. See Shelf."""
        past = oldest_rows(BACKEND_RESPONSES, BACKEND_RESPONSES.c.expires_at <= now)
        forgotten = delete(BACKEND_RESPONSES).where(BACKEND_RESPONSES.c.seq.in_(past))
        is_more = sweep_batch(connection, forgotten)
        return expire_holders(connection, RESPONSES, now) or is_more

    def _mine(self, owner: str) -> ColumnElement[bool]:
        return (RESPONSES.c.owner == owner) & (RESPONSES.c.expires_at > self._now())


def _response(connection: Connection, row: RowMapping) -> StoredResponse:
    fields = {name: row[name] for name in StoredResponse.__slots__}
    output = list_items(connection, row["id"], ITEMS.c.source == "output")
    return StoredResponse(**{**fields, "record": {**json.loads(row["record"]), "output": output}})


def _conversation_before(connection: Connection, row: RowMapping) -> list[Item]:
    """Return the items of a response's conversation from before the response."""
    if not row["conversation_id"]:
        return []
    return list_items(connection, row["conversation_id"], ITEMS.c.seq <= row["seen_seq"])
