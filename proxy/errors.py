"""The errors that clients receive, and the error bodies of OpenAI's and Anthropic's APIs.

ProxyError(status, type, code)
├ BadRequestError          400        the request is wrong; `param` names the field
├ UnauthorizedError        401        the key is missing or wrong
├ ForbiddenError           403        a policy forbids the request; `param` names the setting
├ NotFoundError            404        there is no such route, model or file
├ FileTooLargeError        413        a file exceeds a size limit
├ BodyTooLargeError        413        the request exceeds a size limit
├ QuotaError               400        the key's stored files exceed its quota
├ BudgetError              429        the key's daily budget is used up; Retry-After: midnight, UTC
├ BackendError             its own    the backend refused or failed; keeps the backend's status
│ ├ ContextOverflowError   its own    the conversation no longer fits the model's context window
│ ├ ToolsRefusedError      its own    the model, or its server, accepts no tools at all
│ ├ AnswerTooLargeError    502        the backend's answer exceeds a bound of the proxy
│ └ OutOfTimeError         504        no answer by the deadline; a retry would end the same way
├ IdempotencyError         422        the Idempotency-Key was used before, with another body
├ RunCancelledError        409        another request cancelled the run
├ RunInOtherProcessError        409        the process of the run cannot be reached from here
├ RunLostError             503        the run's server stopped before its result; Retry-After
├ BusyError                503        other requests take all of a shared resource; Retry-After
│ └ KeyBusyError           429        other requests of the key take its share of it; Retry-After
├ PausedError              503        the operator has paused the start of runs; Retry-After
├ ServerStoppingError         503        the server stops before it has an answer; Retry-After
├ TooManyConnectionsError  503        the connection limit is reached; Retry-After
├ StoreUnavailableError    503        the store's database or blobs cannot be reached; Retry-After
├ AuditError               503        the audit log is required and cannot be written
└ SandboxUnavailableError  503        no sandbox is available, or the sandbox was lost; Retry-After

`StoreError` is not for clients: it stops the server's start.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from policies.context import ContextSizes
from policies.headers import ResponseHeader
from policies.tool_support import ToolVerdict

BUSY_RETRY_AFTER_S = 5
"""Retry-After of a server that stops or is busy."""
LOST_RETRY_AFTER_S = 1
"""Retry-After of a run whose server is known to be dead. The server that gets the retry continues
the run or starts it again."""
CONNECTIONS_RETRY_AFTER_S = 2
"""Retry-After of a server that has reached its connection limit."""


class StoreError(Exception):
    """The data directory, the database or the bucket cannot be used."""


class ProxyError(Exception):
    """An error that the client receives as an error body with an HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra_fields: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.extra_fields = dict(extra_fields or {})
        """Numeric fields of a backend's error, in addition to OpenAI's fields."""

    def body(self) -> dict[str, dict[str, str | int | None]]:
        """Return OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.extra_fields,
            }
        }


class BadRequestError(ProxyError):
    """The request is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=400, type="invalid_request_error", code=code, param=param)


class UnauthorizedError(ProxyError):
    """The key is missing or wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            status=401,
            type="invalid_request_error",
            code="invalid_api_key",
            headers={ResponseHeader.AUTHENTICATE: "Bearer"},
        )


class ForbiddenError(ProxyError):
    """A policy forbids the request."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(
            message, status=403, type="permission_error", code="policy_violation", param=param
        )


class NotFoundError(ProxyError):
    """There is no such route, model or file."""

    def __init__(self, message: str, *, code: str = "not_found", param: str | None = None) -> None:
        super().__init__(message, status=404, type="invalid_request_error", code=code, param=param)


class BodyTooLargeError(ProxyError):
    """The request exceeds a size limit. `bound` names the limit, as in "32 MiB"."""

    def __init__(self, bound: str) -> None:
        super().__init__(
            f"The request body has more than {bound}.",
            status=413,
            type="invalid_request_error",
            code="request_too_large",
        )


class BusyError(ProxyError):
    """Other requests take all of a shared resource, such as memory."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            status=503,
            type="server_error",
            code="server_busy",
            headers={ResponseHeader.RETRY_AFTER: str(BUSY_RETRY_AFTER_S)},
        )


class KeyBusyError(BusyError):
    """Other requests of the same key take the key's share of a resource, such as memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status, self.type, self.code = 429, "requests", "rate_limit_exceeded"


class QuotaError(ProxyError):
    """The key's stored files exceed its quota."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"There is no room for this file: {reason}. Delete some files first.",
            status=400,
            type="invalid_request_error",
            code="storage_quota_exceeded",
            param="file",
        )


class BudgetError(ProxyError):
    """The key's daily budget is used up."""

    def __init__(self, kind: str, retry_after_s: float) -> None:
        super().__init__(
            f"You exceeded your current quota: the daily budget of {kind} is used up. It begins"
            " anew at midnight, UTC.",
            status=429,
            type="insufficient_quota",
            code="insufficient_quota",
            headers={ResponseHeader.RETRY_AFTER: str(math.ceil(retry_after_s))},
        )


class FileTooLargeError(ProxyError):
    """A file exceeds a size limit."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(
            message,
            status=413,
            type="invalid_request_error",
            code="file_too_large",
            param=param,
        )


_MESSAGE_INDEX = re.compile(
    r"""(?<=\bmessages)(?P<before>\.?\[|\.|/|\s*->\s*|',\s*)(?P<index>\d{1,6})(?P<after>\]?)"""
)
"""Matches the index of a message in the notations of backends: `messages[3]`, `messages.[3]`,
`messages.3`, `'messages', 3`."""


class BackendError(ProxyError):
    """The backend refused or failed."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        type: str = "backend_error",
        code: str | None = "backend_error",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, type=type, code=code, param=param)
        if retry_after_s is not None:
            self.headers[ResponseHeader.RETRY_AFTER] = str(math.ceil(retry_after_s))
        self.retry_after_s = retry_after_s

    def renumber_messages(self, index_of: Callable[[int], int | None]) -> None:
        """Replace each message index in the error by the result of `index_of`, which is the index
        of the same message in the client's request. If the result is None, remove the index."""

        def replace_index(match: re.Match[str]) -> str:
            index = index_of(int(match["index"]))
            quote = "'" if match["before"].startswith("'") else ""
            return f"{match['before']}{index}{match['after']}" if index is not None else quote

        self.message = _MESSAGE_INDEX.sub(replace_index, self.message)
        self.param = self.param and _MESSAGE_INDEX.sub(replace_index, self.param)


class ContextOverflowError(BackendError):
    """The conversation no longer fits the model's context window."""

    sizes = ContextSizes()
    """The sizes that the backend's message names."""


class ToolsRefusedError(BackendError):
    """The backend refused the request because it contains tools."""

    words = ""
    """The part of the backend's message that names the tools as the reason."""


def no_tools_error(verdict: ToolVerdict) -> ToolsRefusedError:
    """Return the error for a request that needs tools from a model that does not support them."""
    return ToolsRefusedError(
        verdict.message,
        status=400,
        type="invalid_request_error",
        code="tools_not_supported",
        param="model",
    )


_FILE_REFUSAL_STATUSES = (400, 415, 422, 501)


def may_be_file_refusal(error: BackendError) -> bool:
    """Return True if a backend may have refused a request because of its file parts. The wording
    differs between backends, so all errors count except those with another known reason."""
    if error.status not in _FILE_REFUSAL_STATUSES or isinstance(error, ContextOverflowError):
        return False
    return error.param is None or error.param.startswith("messages")


def unreadable_files_error(
    verdict: ToolVerdict, *, param: str | None = None, refusal: str = ""
) -> BadRequestError:
    """Return the error for a request that has files but gets no sandbox, as its model does not
    support tools. `refusal` is the backend's message if the backend has refused the file parts."""
    quotation = f" The backend answered: {refusal}" if refusal else ""
    return BadRequestError(
        "The request has files, and it gets no sandbox in which the model could read them."
        f" {verdict.message} Name a model that supports tools, or send the text of the files in"
        f" the message.{quotation}",
        param=param,
        code="tools_not_supported",
    )


class AnswerTooLargeError(BackendError):
    """The backend's answer exceeds a bound of the proxy. A retry would read all of it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the backend's answer cannot be read: {reason}", code="backend_bad_response"
        )
        self.headers[ResponseHeader.SHOULD_RETRY] = "false"


class OutOfTimeError(BackendError):
    """There is no answer by the deadline."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=504)
        self.headers[ResponseHeader.SHOULD_RETRY] = "false"


class IdempotencyError(ProxyError):
    """The Idempotency-Key was used before, for another request."""

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used before, with another body.",
            status=422,
            type="invalid_request_error",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )


class RunCancelledError(ProxyError):
    """Another request cancelled the run."""

    def __init__(self) -> None:
        super().__init__(
            "The run was cancelled.",
            status=409,
            type="invalid_request_error",
            code="run_cancelled",
            headers={ResponseHeader.SHOULD_RETRY: "false"},  # OpenAI's SDKs retry a 409
        )


class RunInOtherProcessError(ProxyError):
    """The run is in progress in another process of the server, which cannot be reached."""

    def __init__(self) -> None:
        super().__init__(
            "The run is in progress in another process of this server, which cannot be reached from"
            " here.",
            status=409,
            type="invalid_request_error",
            code="run_elsewhere",
        )


class RunLostError(ProxyError):
    """The run has no result, usually because its server stopped. A retry is safe."""

    def __init__(self) -> None:
        super().__init__(
            "The run's server ended before the run had a result. Ask again.",
            status=503,
            type="server_error",
            code="run_lost",
            headers={ResponseHeader.RETRY_AFTER: str(LOST_RETRY_AFTER_S)},
        )


class PausedError(ProxyError):
    """The operator has paused the start of runs."""

    def __init__(self, ends_in_s: float) -> None:
        super().__init__(
            "The operator has paused the start of runs. Ask again.",
            status=503,
            type="server_error",
            code="runs_paused",
            headers={
                ResponseHeader.RETRY_AFTER: str(math.ceil(min(BUSY_RETRY_AFTER_S, ends_in_s)))
            },
        )


class ServerStoppingError(ProxyError):
    """The server stops before it has an answer."""

    def __init__(self) -> None:
        super().__init__(
            "The server was stopped before it had an answer. Ask again.",
            status=503,
            type="server_error",
            code="server_stopped",
            headers={ResponseHeader.RETRY_AFTER: str(BUSY_RETRY_AFTER_S)},
        )


class StoreUnavailableError(ProxyError):
    """The store's database or its blobs cannot be reached."""

    def __init__(self) -> None:
        super().__init__(
            "The server's database cannot be reached. Ask again.",
            status=503,
            type="server_error",
            code="store_unavailable",
            headers={ResponseHeader.RETRY_AFTER: str(BUSY_RETRY_AFTER_S)},
        )


class TooManyConnectionsError(ProxyError):
    """The connection limit is reached, and every open connection has a request."""

    def __init__(self) -> None:
        super().__init__(
            "The server has too many connections open. Ask again.",
            status=503,
            type="server_error",
            code="too_many_connections",
            headers={ResponseHeader.RETRY_AFTER: str(CONNECTIONS_RETRY_AFTER_S)},
        )


class SandboxUnavailableError(ProxyError):
    """No sandbox is available, or the sandbox was lost."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(
            message,
            status=503,
            type="sandbox_error",
            code="sandbox_unavailable",
            headers={ResponseHeader.RETRY_AFTER: str(math.ceil(retry_after_s))},
        )


def internal_error() -> ProxyError:
    """Return the error for a fault of the proxy itself, without details: those are in the log."""
    return ProxyError(
        "The proxy failed.",
        status=500,
        type="server_error",
        code="internal_error",
        # uvicorn closes the connection after an exception.
        headers={ResponseHeader.CONNECTION: "close"},
    )


class AuditError(ProxyError):
    """The run's profile requires an audit log, which cannot be written."""

    def __init__(self) -> None:
        super().__init__(
            "The run was cancelled: its profile requires an audit log, which cannot be written.",
            status=503,
            type="server_error",
            code="audit_unavailable",
        )


# Anthropic's API

_ANTHROPIC_ERROR_TYPES = {
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
PROMPT_TOO_LONG = "prompt is too long"
"""The words in an error message that make Anthropic's clients compact the conversation."""
LOST_THREAD = "thread_not_found"
"""The error code that makes Anthropic's SDKs send the whole conversation again."""
_INDEX = re.compile(r"\[(\d+)\]")


def request_id(run_id: str) -> str:
    """Return the request id of a run, in the form that Anthropic's SDKs expect."""
    return f"req_{run_id}"


def anthropic_error_body(error: ProxyError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error body. It is also the data of an `error` event."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    detail: dict[str, Any] = {
        "type": _ANTHROPIC_ERROR_TYPES.get(error.status, fallback),
        "message": _anthropic_text(error),
    }
    if error.code == LOST_THREAD:
        detail["details"] = {"error_code": error.code}
    return {"type": "error", "error": detail, "request_id": request_id}


def _anthropic_text(error: ProxyError) -> str:
    """Return an error's message in Anthropic's wording. The path of the field is written as
    `a.0.b`, and precedes the message if the message does not contain it."""
    if error.code == "context_length_exceeded":
        return f"{PROMPT_TOO_LONG}: {error.message}"
    if not error.param:
        return error.message
    path = _INDEX.sub(r".\1", error.param)
    if error.code == "missing_required_parameter":
        return f"{path}: Field required"
    if error.param in error.message:
        return error.message.replace(error.param, path)
    return f"{path}: {error.message}"
