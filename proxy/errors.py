"""What the client hears of.

ProxyError(status, type, code)        rendered as OpenAI's error body
├ BadRequestError          400        the request is wrong; `param` names the field
├ UnauthorizedError        401        the key is missing or wrong
├ ForbiddenError           403        a policy forbids it; `param` names the rule
├ NotFoundError            404        no such route, model or file
├ FileTooLargeError        413        a file is larger than may be sent
├ BodyTooLargeError        413        a request is larger than may be sent
├ QuotaError               400        the key's files fill all the room it has
├ BudgetError              429        the key has spent what it may in a day; Retry-After midnight
├ BackendError             its own    the model's server refused or failed; status kept
│ ├ ContextOverflowError   400        the conversation no longer fits the model
│ ├ ToolsRefusedError      its own    the model, or its server, takes no tools at all
│ └ OutOfTimeError         504        no answer by the deadline; to ask again would end the same way
├ IdempotencyError         422        an Idempotency-Key that came before, with another body
├ RunCancelledError        409        somebody else ended the run
├ RunElsewhereError        409        only the process that the run is at work in can end or tell it
├ RunLostError             503        the run's server ended before the run had a result
├ BusyError                503        other requests leave no room for this one; Retry-After
├ ServerStopsError         503        the server ends before there is an answer; Retry-After
├ TooManyConnectionsError  503        as many connections as may be are being answered; Retry-After
├ AuditError               503        what the run does cannot be written down, and must be
└ SandboxUnavailableError  503        no sandbox can be had, or it was lost; Retry-After
"""

import math
import re
from collections.abc import Callable, Mapping

from policies.context import ContextSizes

RESTART_S = 5
"""In how long a server that ends may be there again."""
FULL_S = 2
"""In how long a server whose connections are all in use may have room."""


class ProxyError(Exception):
    """An error the client is told of, in OpenAI's words."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        beside: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.beside = dict(beside or {})
        """Numbers that a backend's error has beside OpenAI's fields."""

    def body(self) -> dict[str, dict[str, str | int | None]]:
        """OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.beside,
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
            headers={"WWW-Authenticate": "Bearer"},
        )


class ForbiddenError(ProxyError):
    """A policy forbids what is asked for."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(
            message, status=403, type="permission_error", code="policy_violation", param=param
        )


class NotFoundError(ProxyError):
    """No such route, model or file."""

    def __init__(self, message: str, *, code: str = "not_found", param: str | None = None) -> None:
        super().__init__(message, status=404, type="invalid_request_error", code=code, param=param)


class BodyTooLargeError(ProxyError):
    """A request is larger than any may be; `bound` is what it has more of, in words."""

    def __init__(self, bound: str) -> None:
        super().__init__(
            f"The request body has more than {bound}.",
            status=413,
            type="invalid_request_error",
            code="request_too_large",
        )


class BusyError(ProxyError):
    """Other requests leave no room for this one."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            status=503,
            type="server_error",
            code="server_busy",
            headers={"Retry-After": str(RESTART_S)},
        )


class QuotaError(ProxyError):
    """The key's files fill all the room it has."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"There is no room for this file: {why}. Delete some first.",
            status=400,
            type="invalid_request_error",
            code="storage_quota_exceeded",
            param="file",
        )


class BudgetError(ProxyError):
    """The key has spent what it may in a day."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(
            f"You exceeded your current quota: the daily budget of {what} is used up. It begins"
            " anew at midnight, UTC.",
            status=429,
            type="insufficient_quota",
            code="insufficient_quota",
            headers={"Retry-After": str(math.ceil(retry_after_s))},
        )


class FileTooLargeError(ProxyError):
    """A file is larger than may be sent."""

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
"""How backends name a message: `messages[3]`, `messages.[3]`, `messages.3`, `'messages', 3`."""


class BackendError(ProxyError):
    """The language model's server refused or failed."""

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
        headers = {} if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
        super().__init__(message, status=status, type=type, code=code, param=param, headers=headers)
        self.retry_after_s = retry_after_s

    def renumber(self, index_of: Callable[[int], int | None]) -> None:
        """Put the client's index in the place of each index of a message that was sent. One that
        is not the client's is left out."""

        def named(found: re.Match[str]) -> str:
            index = index_of(int(found["index"]))
            quote = "'" if found["before"].startswith("'") else ""
            return f"{found['before']}{index}{found['after']}" if index is not None else quote

        self.message = _MESSAGE_INDEX.sub(named, self.message)
        self.param = self.param and _MESSAGE_INDEX.sub(named, self.param)


class ContextOverflowError(BackendError):
    """The conversation no longer fits the model."""

    sizes = ContextSizes()
    """As far as the backend tells them."""


class ToolsRefusedError(BackendError):
    """The backend refused a request because it has tools in it, whatever they are."""

    words = ""
    """The passage of the backend's message that says so."""


class OutOfTimeError(BackendError):
    """There is no answer by the deadline."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=504)
        self.headers["x-should-retry"] = "false"


class IdempotencyError(ProxyError):
    """An Idempotency-Key was used before, for another request."""

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used before, with another body.",
            status=422,
            type="invalid_request_error",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )


class RunCancelledError(ProxyError):
    """The run was ended, by another request."""

    def __init__(self) -> None:
        super().__init__(
            "The run was cancelled.",
            status=409,
            type="invalid_request_error",
            code="run_cancelled",
            headers={"x-should-retry": "false"},  # OpenAI's SDKs would begin it anew
        )


class RunElsewhereError(ProxyError):
    """The run is at work in another process."""

    def __init__(self) -> None:
        super().__init__(
            "The run is at work in another process of this server: only that can end it, or tell it"
            " event by event.",
            status=409,
            type="invalid_request_error",
            code="run_elsewhere",
        )


class RunLostError(ProxyError):
    """The run has ended without a result, its server with it or not; it may be asked for anew."""

    def __init__(self) -> None:
        super().__init__(
            "The run's server ended before the run had a result. Ask again.",
            status=503,
            type="server_error",
            code="run_lost",
        )


class ServerStopsError(ProxyError):
    """The server ends before there is an answer."""

    def __init__(self) -> None:
        super().__init__(
            "The server was stopped before it had an answer. Ask again.",
            status=503,
            type="server_error",
            code="server_stopped",
            headers={"Retry-After": str(RESTART_S)},
        )


class TooManyConnectionsError(ProxyError):
    """As many connections as may be open are being answered."""

    def __init__(self) -> None:
        super().__init__(
            "The server has too many connections open. Ask again.",
            status=503,
            type="server_error",
            code="too_many_connections",
            headers={"Retry-After": str(FULL_S)},
        )


class SandboxUnavailableError(ProxyError):
    """No sandbox can be had, or it was lost."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(
            message,
            status=503,
            type="sandbox_error",
            code="sandbox_unavailable",
            headers={"Retry-After": str(math.ceil(retry_after_s))},
        )


def internal_error() -> ProxyError:
    """What the client hears of what is our fault; the log has the rest."""
    return ProxyError(
        "The proxy failed.",
        status=500,
        type="server_error",
        code="internal_error",
        headers={"Connection": "close"},  # the server ends it, which the client must know
    )


class AuditError(ProxyError):
    """What the run does cannot be written down, and must be."""

    def __init__(self) -> None:
        super().__init__(
            "The run was ended: what it does must be written down, and its audit log cannot be"
            " written.",
            status=503,
            type="server_error",
            code="audit_unavailable",
        )
