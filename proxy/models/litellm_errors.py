"""What litellm raises, as our errors: it hides a provider's own answer in a chain of causes."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx

from proxy.errors import BackendError
from proxy.models.backend_errors import (
    backend_error,
    cut_off,
    payload_of,
    redacted,
    retry_after_s,
    timed_out,
    unreachable,
)


def translated(error: Exception, *, overflows: bool, secret: str | None) -> BackendError:
    """The error that litellm's one means; `overflows` where litellm itself has seen that."""
    for cause in _causes(error):
        if isinstance(cause, httpx.TransportError):
            return _lost(cause, secret)
        if isinstance(cause, httpx.HTTPStatusError):
            return _answered(cause.response, error, overflows, secret)
    return backend_error(
        _own_words(error), status=_status(error), overflows=overflows, secret=secret
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _lost(cause: httpx.TransportError, secret: str | None) -> BackendError:
    if isinstance(cause, httpx.TimeoutException):
        return timed_out(type(cause).__name__)
    if isinstance(cause, httpx.ReadError | httpx.RemoteProtocolError):
        return cut_off()
    return unreachable(redacted(str(cause), secret))


def _answered(
    response: httpx.Response, error: Exception, overflows: bool, secret: str | None
) -> BackendError:
    try:
        payload = payload_of(response.content)
    except httpx.ResponseNotRead:
        payload = None
    headers = {name.lower(): value for name, value in response.headers.items()}
    return backend_error(
        payload or _own_words(error),
        status=response.status_code,
        retry_after_s=retry_after_s(headers, datetime.now(UTC)),
        overflows=overflows,
        secret=secret,
    )


def _own_words(error: Exception) -> dict[str, Any]:
    fields = {name: getattr(error, name, None) for name in ("type", "code", "param")}
    return {"message": str(error).split("\n", 1)[0], **fields}


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None
