"""Objects of /v1/files, /v1/containers and /v1/conversations: reading requests, writing answers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.store.records import (
    Container,
    ContainerFile,
    ContainerWish,
    Conversation,
    Page,
    StoredUpload,
)
from proxy.wire.responses_shapes import MEMORY_LIMITS, item
from proxy.wire.validation import (
    anything,
    array,
    integer,
    mapping,
    missing,
    object_with,
    one_of,
    require,
    text,
    too_much,
    unsupported,
)

# Lists

Sizes = tuple[int, int]
"""The default and the largest number of objects on one page of a list."""
FILES: Sizes = (10_000, 10_000)
CONTAINERS: Sizes = (20, 100)
"""Of the lists of containers, of their files, and of all other objects but uploads."""


def page(query: Mapping[str, str], sizes: Sizes) -> Page:
    """Return the page of a list that a query asks for. Raises BadRequestError."""
    order = query.get("order", "desc")
    one_of("asc", "desc")(order, "order")
    default, most = sizes
    limit = integer_param(query.get("limit"), "limit", least=1, most=most)
    return Page(default if limit is None else limit, order == "desc", query.get("after") or None)


def integer_param(value: Any, param: str, *, least: int, most: int) -> int | None:
    """Return a whole number that may be written as a string, or None if there is none.

    Raises BadRequestError for any other value and outside the bounds.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        value = int(value)
    integer(least, most)(value, param)
    return int(value)


def listing(items: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object. In an empty one `first_id` and `last_id` are empty strings."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


def deleted(id: str, kind: str) -> dict[str, Any]:
    """Return OpenAI's object for a deleted object."""
    return {"id": id, "object": kind, "deleted": True}


# Uploads

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
EXPIRES_S = (3600, 2592000)
"""The shortest and the longest time for which an upload is kept."""
_EXPIRY_FIELDS = ("anchor", "seconds")


def purpose(fields: Mapping[str, str]) -> str:
    """Return the form's `purpose`. Raises BadRequestError."""
    given = fields.get("purpose")
    if given is None:
        raise missing("purpose")
    one_of(*PURPOSES)(given, "purpose")
    return given


def expires_after_s(fields: Mapping[str, str]) -> int | None:
    """Return how long the upload is to be kept, or None. Raises BadRequestError."""
    given = _expires_after(fields)
    if given is None:
        return None
    anchor, seconds = (given.get(name) for name in _EXPIRY_FIELDS)
    if anchor is None:
        raise missing("expires_after.anchor")
    one_of("created_at")(anchor, "expires_after.anchor")
    if seconds is None:
        raise missing("expires_after.seconds")
    least, most = EXPIRES_S
    return integer_param(seconds, "expires_after.seconds", least=least, most=most)


def _expires_after(fields: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return `expires_after`. SDKs send one form field for each of its fields; others send JSON."""
    whole = fields.get("expires_after")
    if whole is None:
        given = {name: fields.get(f"expires_after[{name}]") for name in _EXPIRY_FIELDS}
        return given if any(value is not None for value in given.values()) else None
    try:
        tree: Any = json.loads(whole)
    except (ValueError, RecursionError):
        tree = whole
    mapping(tree, "expires_after")
    return dict(tree)


def upload_object(upload: StoredUpload) -> dict[str, Any]:
    """Return OpenAI's file object."""
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.bytes,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": "processed",
    }


# Containers

MAX_NAME_CHARS = 512
MAX_FILES = 100
MAX_DOMAINS = 1000
_EXPIRY = object_with({"anchor": one_of("last_active_at"), "minutes": anything})
_POLICY = object_with({"type": one_of("disabled", "allowlist")})


def container_wish(asked: Mapping[str, Any], *, max_minutes: int) -> ContainerWish:
    """Return the container that a request asks for. Raises BadRequestError."""
    for field in ("skills", "network_policy.domain_secrets"):
        if _at(asked, field) not in (None, []):
            raise unsupported(field, "Containers have none here.")
    name = name_of(asked, "name")
    if name is None:
        raise missing("name")
    memory_limit = asked.get("memory_limit")
    if memory_limit is not None:
        one_of(*MEMORY_LIMITS)(memory_limit, "memory_limit")
    return ContainerWish(
        name=name,
        minutes=_minutes(asked.get("expires_after"), max_minutes),
        memory_limit=memory_limit,
        network_policy=_network_policy(asked.get("network_policy")),
    )


def file_ids(asked: Mapping[str, Any]) -> list[str]:
    """Return the ids of the uploads that a new container begins with. Raises BadRequestError."""
    given = asked.get("file_ids")
    if given is None:
        return []
    array(text)(given, "file_ids")
    if len(given) > MAX_FILES:
        raise too_much("file_ids", "array_above_max_length", str(MAX_FILES))
    return [_clean(each) for each in given]


def name_of(asked: Mapping[str, Any], field: str) -> str | None:
    """Return the name in a field, or None. Raises BadRequestError."""
    value = asked.get(field)
    if value is None:
        return None
    text(value, field)
    if len(value) > MAX_NAME_CHARS:
        raise too_much(field, "string_above_max_length", f"{MAX_NAME_CHARS} characters")
    return _clean(value)


def container_object(container: Container, zip_url: str) -> dict[str, Any]:
    """Return OpenAI's container object, with the URL of an archive of all its files."""
    return {
        "id": container.id,
        "object": "container",
        "name": container.name,
        "created_at": container.created_at,
        "status": "running",
        "last_active_at": container.last_active_at,
        "expires_after": {"anchor": "last_active_at", "minutes": container.minutes},
        **({"memory_limit": container.memory_limit} if container.memory_limit else {}),
        **({"network_policy": container.network_policy} if container.network_policy else {}),
        "zip_url": zip_url,
    }


def container_file_object(file: ContainerFile, url: str) -> dict[str, Any]:
    """Return OpenAI's container file object, with the URL of the file."""
    return {
        "id": file.id,
        "object": "container.file",
        "container_id": file.container_id,
        "created_at": file.created_at,
        "bytes": file.bytes,
        "path": file.path,
        "source": file.source,
        "url": url,
    }


def _minutes(expires_after: Any, most: int) -> int:
    if expires_after is None:
        return most
    _EXPIRY(expires_after, "expires_after")
    integer(1, most)(expires_after["minutes"], "expires_after.minutes")
    return int(expires_after["minutes"])


def _network_policy(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    _POLICY(given, "network_policy")
    if given["type"] == "disabled":
        return {"type": given["type"]}
    param = "network_policy.allowed_domains"
    domains = given.get("allowed_domains")
    array(text, minimum=1)(domains, param)
    if len(domains) > MAX_DOMAINS:
        raise too_much(param, "array_above_max_length", f"{MAX_DOMAINS} domains")
    return {"type": given["type"], "allowed_domains": domains}


def _at(fields: Mapping[str, Any], path: str) -> Any:
    found: Any = fields
    for step in path.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _clean(value: str) -> str:
    return value.encode(errors="replace").decode()  # half a surrogate pair is no text


# Conversations

MAX_ITEMS = 20
"""Items that one request can add."""
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Of `metadata`."""


def metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Return a conversation's metadata. Raises BadRequestError."""
    pairs = body.get("metadata")
    if pairs is None:
        return {}
    mapping(pairs, "metadata")
    if len(pairs) > MAX_PAIRS:
        raise too_much("metadata", "object_above_max_properties", f"{MAX_PAIRS} pairs")
    for key, value in pairs.items():
        text(value, f"metadata.{key}")
        if len(key) > MAX_KEY_CHARS:
            raise too_much("metadata", "string_above_max_length", f"{MAX_KEY_CHARS} characters")
        if len(value) > MAX_VALUE_CHARS:
            words = f"{MAX_VALUE_CHARS} characters"
            raise too_much(f"metadata.{key}", "string_above_max_length", words)
    return dict(pairs)


def items(body: Mapping[str, Any], *, required: bool) -> list[dict[str, Any]]:
    """Return the items that a request adds, unchanged. Raises BadRequestError."""
    if required:
        require(body, "items", "items")
    given: Any = body.get("items")
    if given is None and not required:
        return []
    array(item)(given, "items")
    if len(given) > MAX_ITEMS:
        raise too_much("items", "array_above_max_length", f"{MAX_ITEMS} items")
    return list(given)


def conversation_object(conversation: Conversation) -> dict[str, Any]:
    """Return OpenAI's conversation object."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": dict(conversation.metadata),
    }
