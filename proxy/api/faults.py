"""Errors as responses, in the words of the API that was asked."""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.json_response import JSON
from proxy.errors import ProxyError
from proxy.wire.messages_answer import request_id
from proxy.wire.messages_errors import error_body

MESSAGES = "/v1/messages"


def told(request: Request, error: ProxyError) -> Response:
    """The response that tells of an error."""
    path = request.url.path
    if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
        return JSON(error.body(), status_code=error.status, headers=error.headers)
    name = request_id(uuid.uuid4().hex)
    headers = {**error.headers, "request-id": name}
    return JSON(error_body(error, name), status_code=error.status, headers=headers)
