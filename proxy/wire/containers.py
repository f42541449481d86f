"""/v1/containers: what we read of a request, and containers and their files in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

from proxy.errors import BadRequestError
from proxy.store.records import Container, ContainerFile, ContainerWish
from proxy.wire.listing import integer

MEMORY_LIMITS = ("1g", "4g", "16g", "64g")
MAX_NAME_CHARS = 512
MAX_FILES = 100
MAX_DOMAINS = 1000


def container_wish(body: object, *, max_minutes: int) -> ContainerWish:
    """The container that is asked for. Raises BadRequestError."""
    fields = an_object(body)
    for field in ("skills", "network_policy.domain_secrets"):
        if _at(fields, field) not in (None, []):
            raise BadRequestError(
                f"Unsupported parameter: '{field}'.", param=field, code="unsupported_parameter"
            )
    name = text(fields, "name")
    if name is None:
        raise BadRequestError(
            "Missing required parameter: 'name'.", param="name", code="missing_required_parameter"
        )
    memory_limit = text(fields, "memory_limit")
    if memory_limit is not None:
        _one_of(memory_limit, MEMORY_LIMITS, "memory_limit")
    return ContainerWish(
        name=name,
        minutes=_minutes(fields.get("expires_after"), max_minutes),
        memory_limit=memory_limit,
        network_policy=_network_policy(fields.get("network_policy")),
    )


def file_ids(body: object) -> list[str]:
    """The uploads that the container begins with. Raises BadRequestError."""
    given = an_object(body).get("file_ids")
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise _wrong_type("file_ids", "an array of strings")
    if len(given) > MAX_FILES:
        raise BadRequestError(
            f"Invalid 'file_ids': more than {MAX_FILES}.",
            param="file_ids",
            code="array_above_max_length",
        )
    return [_clean(each) for each in given]


def an_object(body: object) -> Mapping[str, Any]:
    """The body's fields. Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    return body


def text(fields: Mapping[str, Any], name: str) -> str | None:
    """A field's text; None where there is none. Raises BadRequestError."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong_type(name, "a string")
    if len(value) > MAX_NAME_CHARS:
        raise BadRequestError(
            f"Invalid '{name}': longer than {MAX_NAME_CHARS} characters.",
            param=name,
            code="string_above_max_length",
        )
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


def _minutes(expires_after: object, most: int) -> int:
    if expires_after is None:
        return most
    fields = expires_after if isinstance(expires_after, dict) else None
    if fields is None:
        raise _wrong_type("expires_after", "an object")
    _one_of(fields.get("anchor"), ("last_active_at",), "expires_after.anchor")
    param = "expires_after.minutes"
    if isinstance(fields.get("minutes"), str):
        raise _wrong_type(param, "an integer")
    minutes = integer(fields.get("minutes"), param, least=1, most=most)
    if minutes is None:
        raise BadRequestError(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    return minutes


def _network_policy(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _wrong_type("network_policy", "an object")
    kind = given.get("type")
    _one_of(kind, ("disabled", "allowlist"), "network_policy.type")
    if kind == "disabled":
        return {"type": kind}
    domains = given.get("allowed_domains")
    if not isinstance(domains, list) or not 0 < len(domains) <= MAX_DOMAINS:
        raise _wrong_type("network_policy.allowed_domains", "an array of domains")
    if not all(isinstance(each, str) for each in domains):
        raise _wrong_type("network_policy.allowed_domains", "an array of strings")
    return {"type": kind, "allowed_domains": domains}


def _at(fields: Mapping[str, Any], path: str) -> Any:
    found: Any = fields
    for step in path.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _one_of(value: object, allowed: tuple[str, ...], param: str) -> None:
    if value not in allowed:
        raise BadRequestError(
            f"Invalid value: {value!r}. Supported values are: {', '.join(map(repr, allowed))}.",
            param=param,
            code="invalid_value",
        )


def _wrong_type(param: str, expected: str) -> BadRequestError:
    return BadRequestError(
        f"Invalid type for '{param}': expected {expected}.", param=param, code="invalid_type"
    )


def _clean(value: str) -> str:
    return value.encode(errors="replace").decode()  # half a surrogate pair is no text
