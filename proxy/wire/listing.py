"""Lists: which part a client asks for, and how it is told."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.store.records import Page
from proxy.wire import validation as shapes
from proxy.wire.validation import one_of

ORDERS = ("asc", "desc")
Sizes = tuple[int, int]
FILES: Sizes = (10_000, 10_000)
"""How many a list of files tells of unless it is asked for fewer, and at most."""
CONTAINERS: Sizes = (20, 100)
"""The same for containers, and for their files."""


def page(query: Mapping[str, str], sizes: Sizes) -> Page:
    """The part that the query asks for. Raises BadRequestError."""
    order = query.get("order", "desc")
    one_of(*ORDERS)(order, "order")
    default, most = sizes
    limit = integer(query.get("limit"), "limit", least=1, most=most)
    return Page(default if limit is None else limit, order == "desc", query.get("after") or None)


def integer(value: Any, param: str, *, least: int, most: int) -> int | None:
    """A whole number within bounds, also one that is written out; None where none is given.
    Raises BadRequestError."""
    if value is None:
        return None
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        value = int(value)
    validation.integer(least, most)(value, param)
    return int(value)


def listing(items: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object. An empty one has no first and last id; the fields are strings."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


def deleted(id: str, kind: str) -> dict[str, Any]:
    """OpenAI's words for what was deleted."""
    return {"id": id, "object": kind, "deleted": True}
