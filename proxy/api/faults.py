"""Errors as responses, in the words of the API that was asked."""

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.connection import noted_run, own_request_id
from proxy.api.json_response import JSON
from proxy.errors import ProxyError, error_body

MESSAGES = "/v1/messages"


def told(request: Request, error: ProxyError) -> Response:
    """The response that tells of an error."""
    path, run_id = request.url.path, noted_run(request)
    headers = {**error.headers, "X-Sandbox-Run": run_id} if run_id else error.headers
    if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
        return JSON(error.body(), status_code=error.status, headers=headers)
    name = own_request_id(request.scope)
    headers = {**headers, "request-id": name}
    return JSON(error_body(error, name), status_code=error.status, headers=headers)
