"""Errors as Anthropic's API tells them."""

import re
from typing import Any

from proxy.errors import ProxyError

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long"
"""By these words clients know that they must shorten a conversation."""
LOST_THREAD = "thread_not_found"
"""By this code Anthropic's SDKs know that they must send a conversation anew."""
_INDEX = re.compile(r"\[(\d+)\]")


def error_body(error: ProxyError, request_id: str) -> dict[str, Any]:
    """The body of an error response, and the data of an `error` event."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    told: dict[str, Any] = {
        "type": _TYPES.get(error.status, fallback),
        "message": _message(error),
    }
    if error.code == LOST_THREAD:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


def _message(error: ProxyError) -> str:
    """Anthropic says first which place it is, and writes places with dots."""
    if error.code == "context_length_exceeded":
        return f"{TOO_LONG}: {error.message}"
    if not error.param:
        return error.message
    place = _INDEX.sub(r".\1", error.param)
    if error.code == "missing_required_parameter":
        return f"{place}: Field required"
    if error.param in error.message:
        return error.message.replace(error.param, place)
    return f"{place}: {error.message}"
