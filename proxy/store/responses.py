"""Responses that clients can retrieve and continue, and the owners of responses that the backend
stores."""

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
    delete_with_items,
    expire_with_items,
    get_items,
    items_by_parent,
    list_items,
)
from proxy.store.database import Database, oldest_rows, sweep_batch
from proxy.store.records import ResponseChain, StoredResponse
from proxy.store.tables import BACKEND_RESPONSES, CONVERSATIONS, ITEMS, RESPONSES, STREAMS

MAX_CHAIN_LENGTH = 1000
"""Maximum number of predecessors of a response, linked by `previous_response_id`, that are read."""
MAX_BACKEND_RESPONSES = 10_000
"""Maximum number of one owner's responses in the backend. Above it, the oldest responses are
forgotten."""
EXPIRY_SLACK_S = 60
"""An expiry is rewritten only if it is postponed by more than this number of seconds."""


class ResponseRepository:
    """Stores the responses of all owners. Each owner sees only its own responses."""

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
        """Store a response that begins, and postpone the expiry of its conversation and of `chain`,
        the responses before it."""
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

        used: list[tuple[Table, Sequence[str]]] = [(RESPONSES, chain)] if chain else []
        if response.conversation_id:
            used.append((CONVERSATIONS, [response.conversation_id]))

        def transaction(connection: Connection) -> None:
            size = len(record) + add_items(connection, owner, response.id, inputs)
            connection.execute(insert(RESPONSES), {**row, "bytes": size})
            for table, ids in used:
                change = update(table).where(table.c.id.in_(ids), table.c.owner == owner)
                change = change.where(table.c.expires_at < until - EXPIRY_SLACK_S)
                connection.execute(change.values(expires_at=until))
            self._quota.charge(connection, owner, size, response.id)

        await self._database.write(transaction)

    async def end(
        self, owner: str, response_id: str, record: Mapping[str, Any], frames: str | None = None
    ) -> None:
        """Store the final response and its stream, unless the response has been deleted.

        If the response is completed or incomplete, its items are appended to its conversation.
        """
        output = record["output"]
        written = json.dumps({**record, "output": []})
        this = (RESPONSES.c.owner == owner) & (RESPONSES.c.id == response_id)
        query = select(RESPONSES.c.conversation_id).where(this)
        change = update(RESPONSES).where(this).values(record=written, worker=None)

        def transaction(connection: Connection) -> None:
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
                items = list_items(connection, response_id)
                size += append_to_conversation(connection, owner, row.conversation_id, items)
            self._quota.charge(connection, owner, size, response_id)

        await self._database.write(transaction)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response, or None."""
        query = select(RESPONSES).where(self._is_live(owner), RESPONSES.c.id == response_id)

        def transaction(connection: Connection) -> StoredResponse | None:
            row = connection.execute(query).mappings().one_or_none()
            return _response(connection, row) if row else None

        return await self._database.read(transaction)

    async def frames(self, owner: str, response_id: str) -> str | None:
        """Return the stream that `end` stored with a response, or None."""
        response = select(RESPONSES.c.id).where(self._is_live(owner), RESPONSES.c.id == response_id)
        query = select(STREAMS.c.frames).where(STREAMS.c.response_id.in_(response))
        return await self._database.read(lambda c: c.execute(query).scalar_one_or_none())

    async def chain(self, owner: str, response_id: str) -> ResponseChain | None:
        """Return the owner's response with at most `MAX_CHAIN_LENGTH` predecessors, or None."""
        live = self._is_live(owner)
        latest = select(RESPONSES.c.id, RESPONSES.c.previous_id, literal(0).label("depth"))
        chain = latest.where(live, RESPONSES.c.id == response_id).cte(recursive=True)
        previous = select(RESPONSES.c.id, RESPONSES.c.previous_id, chain.c.depth + 1)
        chain = chain.union_all(
            previous.where(
                live, RESPONSES.c.id == chain.c.previous_id, chain.c.depth < MAX_CHAIN_LENGTH
            )
        )
        query = select(RESPONSES).join(chain, chain.c.id == RESPONSES.c.id)
        query = query.order_by(chain.c.depth)

        def transaction(connection: Connection) -> ResponseChain | None:
            rows = connection.execute(query).mappings().all()
            if not rows:
                return None
            ids = tuple(row["id"] for row in rows)
            items = items_by_parent(connection, ids[1:])
            items[ids[0]] = list_items(connection, ids[0], ITEMS.c.source == "input")
            inputs = [
                item
                for row in reversed(rows)
                for item in (*_earlier_conversation_items(connection, row), *items[row["id"]])
            ]
            latest = _response(connection, rows[0])
            states = (row["state"] for row in rows if row["session"] == latest.session)
            return ResponseChain(latest, ids, tuple(states), tuple(inputs))

        return await self._database.read(transaction)

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """Return the owner's items with these ids."""
        return await self._database.read(lambda c: get_items(c, owner, ids))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and its items. Return False if there is no such response."""
        query = select(RESPONSES.c.id).where(self._is_live(owner), RESPONSES.c.id == response_id)

        def transaction(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            delete_with_items(connection, RESPONSES, found)
            return bool(found)

        return await self._database.write(transaction)

    async def add_backend_response(self, owner: str, response_id: str) -> None:
        """Record the owner of a response that the backend stores."""
        table, until = BACKEND_RESPONSES, self.settings.expiry(int(self._now()))
        row = {"owner": owner, "id": response_id, "expires_at": until}
        last = select(table.c.seq).where(table.c.owner == owner).order_by(table.c.seq.desc())
        beyond = last.limit(1).offset(MAX_BACKEND_RESPONSES).scalar_subquery()

        def transaction(connection: Connection) -> None:
            of_owner = table.c.owner == owner
            connection.execute(delete(table).where(of_owner, table.c.id == response_id))
            connection.execute(insert(table), row)
            connection.execute(delete(table).where(of_owner, table.c.seq <= beyond))

        await self._database.write(transaction)

    async def is_backend_response(self, owner: str, response_id: str) -> bool:
        """Return True if the owner has a response with that id in the backend."""
        table = BACKEND_RESPONSES.c
        query = select(table.seq).where(
            table.owner == owner, table.id == response_id, table.expires_at > self._now()
        )
        return await self._database.read(lambda c: c.execute(query).first() is not None)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired responses. See Repository."""
        expired = oldest_rows(BACKEND_RESPONSES, BACKEND_RESPONSES.c.expires_at <= now)
        is_more = sweep_batch(connection, delete(BACKEND_RESPONSES).where(expired))
        return expire_with_items(connection, RESPONSES, now) or is_more

    def _is_live(self, owner: str) -> ColumnElement[bool]:
        return (RESPONSES.c.owner == owner) & (RESPONSES.c.expires_at > self._now())


def _response(connection: Connection, row: RowMapping) -> StoredResponse:
    fields = {name: row[name] for name in StoredResponse.__slots__}
    output = list_items(connection, row["id"], ITEMS.c.source == "output")
    return StoredResponse(**{**fields, "record": {**json.loads(row["record"]), "output": output}})


def _earlier_conversation_items(connection: Connection, row: RowMapping) -> list[Item]:
    """Return the items that the response's conversation had when the response began."""
    if not row["conversation_id"]:
        return []
    return list_items(connection, row["conversation_id"], ITEMS.c.seq <= row["seen_seq"])
