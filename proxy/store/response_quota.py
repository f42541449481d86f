"""How much the responses and conversations of one key may fill."""

from collections import defaultdict

from sqlalchemy import Connection, func, select, union_all

from proxy.store.items import discard
from proxy.store.tables import CONVERSATIONS, RESPONSES

STEPS = 16
"""It is counted anew whenever so large a part of the quota was added: counting takes time."""


class ResponseQuota:
    """Each owner's, of the same size."""

    def __init__(self, quota: int) -> None:
        self._quota = quota
        self._added = defaultdict[str, int](lambda: quota)
        """By each owner since it was counted."""

    def take(self, connection: Connection, owner: str, size: int, but: str) -> None:
        """Add so many bytes. Where they are too many, what was used the longest ago goes, and the
        one named `but` stays."""
        self._added[owner] += size
        if self._added[owner] < self._quota // STEPS:
            return
        self._added[owner] = 0
        both = union_all(
            *(
                select(table.c.id, table.c.bytes, table.c.expires_at, table.c.created_at).where(
                    table.c.owner == owner
                )
                for table in (RESPONSES, CONVERSATIONS)
            )
        ).subquery()
        latest = (both.c.expires_at.desc(), both.c.created_at.desc(), both.c.id)
        total = func.sum(both.c.bytes).over(order_by=latest)
        sizes = select(both.c.id, total.label("total")).subquery()
        beyond = select(sizes.c.id).where(sizes.c.total > self._quota, sizes.c.id != but)
        if gone := connection.execute(beyond).scalars().all():
            discard(connection, RESPONSES, gone)
            discard(connection, CONVERSATIONS, gone)
