"""Requests that come with the client's own key of the backend: asked about before anything else."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.agent.model import Credentials
from proxy.api.connection import is_operator, key_sent, owner_of, take_client
from proxy.api.faults import told
from proxy.errors import ProxyError
from proxy.keys import ClientKeys, Key

_ACCOUNT_HEADERS = ("openai-organization", "openai-project")
_OPEN_PATHS = frozenset({"/health"})


class ClientKeyMiddleware:
    """Refuses a request whose key the backend does not accept. One without a key passes, and one
    with the operator's, which is not the backend's to see: its route decides whether that will
    do."""

    def __init__(self, app: ASGIApp, keys: ClientKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            request = Request(scope)
            key = key_sent(request)
            if key and not is_operator(request):
                credentials = Credentials(key, _account(request.headers))
                try:
                    await self._keys.require_accepted(credentials)
                except ProxyError as error:
                    await told(request, error)(scope, receive, send)
                    return
                # Each key has a daily budget of its own, under a name that does not reveal it.
                take_client(request, Key(owner_of(key)), credentials)
        await self._app(scope, receive, send)


def _account(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _ACCOUNT_HEADERS if headers.get(name)}
