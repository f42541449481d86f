"""/v1/containers: what we read of a request, and containers and their files in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

from proxy.store.records import Container, ContainerFile, ContainerWish
from proxy.wire.responses_shapes import MEMORY_LIMITS
from proxy.wire.validation import anything, array, having, integer, missing, one_of, text, too_much, unsupported

MAX_NAME_CHARS = 512
MAX_FILES = 100
MAX_DOMAINS = 1000
_EXPIRY = having({"anchor": one_of("last_active_at"), "minutes": anything})
_POLICY = having({"type": one_of("disabled", "allowlist")})


def container_wish(asked: Mapping[str, Any], *, max_minutes: int) -> ContainerWish:
    """The container that is asked for. Raises BadRequestError."""
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
    """The uploads that the container begins with. Raises BadRequestError."""
    given = asked.get("file_ids")
    if given is None:
        return []
    array(text)(given, "file_ids")
    if len(given) > MAX_FILES:
        raise too_much("file_ids", "array_above_max_length", str(MAX_FILES))
    return [_clean(each) for each in given]


def name_of(asked: Mapping[str, Any], field: str) -> str | None:
    """A name that a field has; None where there is none. Raises BadRequestError."""
    value = asked.get(field)
    if value is None:
        return None
    text(value, field)
    if len(value) > MAX_NAME_CHARS:
        raise too_much(field, "string_above_max_length", f"{MAX_NAME_CHARS} characters")
    return _clean(value)


def container_object(container: Container, zip_url: str) -> dict[str, Any]:
    """OpenAI's container object, and beside it where all its files can be fetched."""
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
    """OpenAI's container file object, and beside it where the file can be fetched."""
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
