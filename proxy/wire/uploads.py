"""/v1/files: what we read of a form, and an upload in OpenAI's shape."""

import json
from collections.abc import Mapping
from typing import Any

from proxy.errors import BadRequestError
from proxy.store.records import StoredUpload
from proxy.wire.listing import integer

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
EXPIRES_S = (3600, 2592000)


def purpose(fields: Mapping[str, str]) -> str:
    """What the file is for. Raises BadRequestError."""
    given = fields.get("purpose")
    if given in PURPOSES:
        return given
    if given is None:
        raise BadRequestError(
            "Missing required parameter: 'purpose'.",
            param="purpose",
            code="missing_required_parameter",
        )
    raise BadRequestError(
        f"Invalid value: {given!r}. Supported values are: {', '.join(map(repr, PURPOSES))}.",
        param="purpose",
        code="invalid_value",
    )


def expires_after_s(fields: Mapping[str, str]) -> int | None:
    """How long the client wants it kept. Raises BadRequestError."""
    given = _expires_after(fields)
    if not given:
        return None
    anchor, seconds = given.get("anchor"), given.get("seconds")
    if anchor != "created_at":
        param = "expires_after.anchor"
        raise BadRequestError(
            f"Invalid value: {anchor!r}. Supported values are: 'created_at'.",
            param=param,
            code="invalid_value",
        )
    if seconds is None:
        param = "expires_after.seconds"
        raise BadRequestError(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    least, most = EXPIRES_S
    return integer(seconds, "expires_after.seconds", least=least, most=most)


def _expires_after(fields: Mapping[str, str]) -> Mapping[str, Any]:
    """As the SDKs write it, one field for each of its own, or as one field of JSON."""
    whole = fields.get("expires_after")
    if whole is None:
        names = ("anchor", "seconds")
        given = {name: fields.get(f"expires_after[{name}]") for name in names}
        return {name: value for name, value in given.items() if value is not None}
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
