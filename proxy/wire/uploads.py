"""/v1/files: what we read of a form, and an upload in OpenAI's shape."""

import json
from collections.abc import Mapping
from typing import Any

from proxy.store.records import StoredUpload
from proxy.wire.listing import integer
from proxy.wire.validation import mapping, missing, one_of

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
EXPIRES_S = (3600, 2592000)
_EXPIRY_FIELDS = ("anchor", "seconds")


def purpose(fields: Mapping[str, str]) -> str:
    """What the file is for. Raises BadRequestError."""
    given = fields.get("purpose")
    if given is None:
        raise missing("purpose")
    one_of(*PURPOSES)(given, "purpose")
    return given


def expires_after_s(fields: Mapping[str, str]) -> int | None:
    """How long the client wants it kept. Raises BadRequestError."""
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
    return integer(seconds, "expires_after.seconds", least=least, most=most)


def _expires_after(fields: Mapping[str, str]) -> Mapping[str, Any] | None:
    """As the SDKs write it, one field for each of its own, or as one field of JSON."""
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
