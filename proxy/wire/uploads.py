"""/v1/files: what we read of a form, and an upload in OpenAI's shape."""

import json
from collections.abc import Mapping
from typing import Any

from proxy.errors import BadRequestError
from proxy.store.records import StoredUpload
from proxy.wire.listing import integer

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
EXPIRES_S = (3600, 2592000)
_EXPIRY_FIELDS = ("anchor", "seconds")


def purpose(fields: Mapping[str, str]) -> str:
    """What the file is for. Raises BadRequestError."""
    given = fields.get("purpose")
    if given in PURPOSES:
        return given
    if given is None:
        raise _missing("purpose")
    raise BadRequestError(
        f"Invalid value: {given!r}. Supported values are: {', '.join(map(repr, PURPOSES))}.",
        param="purpose",
        code="invalid_value",
    )


def expires_after_s(fields: Mapping[str, str]) -> int | None:
    """How long the client wants it kept. Raises BadRequestError."""
    given = _expires_after(fields)
    if given is None:
        return None
    anchor, seconds = (given.get(name) for name in _EXPIRY_FIELDS)
    if anchor is None:
        raise _missing("expires_after.anchor")
    if anchor != "created_at":
        raise BadRequestError(
            f"Invalid value: {anchor!r}. Supported values are: 'created_at'.",
            param="expires_after.anchor",
            code="invalid_value",
        )
    if seconds is None:
        raise _missing("expires_after.seconds")
    least, most = EXPIRES_S
    return integer(seconds, "expires_after.seconds", least=least, most=most)


def _missing(param: str) -> BadRequestError:
    return BadRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _expires_after(fields: Mapping[str, str]) -> Mapping[str, Any] | None:
    """As the SDKs write it, one field for each of its own, or as one field of JSON."""
    whole = fields.get("expires_after")
    if whole is None:
        given = {name: fields.get(f"expires_after[{name}]") for name in _EXPIRY_FIELDS}
        return given if any(value is not None for value in given.values()) else None
    try:
        tree = json.loads(whole)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise BadRequestError(
            "Invalid type for 'expires_after': expected an object.",
            param="expires_after",
            code="invalid_type",
        )
    return tree


def upload_object(upload: StoredUpload) -> dict[str, Any]:
    """OpenAI's file object."""
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
