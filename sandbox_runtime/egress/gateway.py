"""The one way out of one sandbox."""

import asyncio
import inspect
from collections.abc import Collection, Mapping

import anyio

from policies.egress import Egress, Rules
from policies.hosts import Target
from sandbox_runtime.egress.connection import Connection
from sandbox_runtime.egress.decision import Decision, OnAsk, OnDecision
from sandbox_runtime.egress.dialer import Connect, Dialer, Endpoint, open_connection
from sandbox_runtime.egress.meter import Meter
from sandbox_runtime.egress.patience import Patience
from sandbox_runtime.egress.request_head import Header
from sandbox_runtime.egress.resolver import Resolve
from sandbox_runtime.egress.visit import Visit

_LISTENER_S = 5.0


class Gateway:
    """Decides on and serves the connections of a sandbox that is lent."""

    def __init__(
        self,
        egress: Egress,
        *,
        resolve: Resolve,
        connect: Connect = open_connection,
        forbidden: Collection[Endpoint] = (),
        secrets: Mapping[str, str] | None = None,
        on_ask: OnAsk | None = None,
        on_event: OnDecision | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`forbidden`: the proxy's own and its backends' addresses, which no rule opens; `secrets`:
        values of the environment variables that `egress.headers` names. Raises ValueError."""
        self._egress = egress
        self._rules = Rules(egress)
        self._patience = patience or Patience()
        self._dialer = Dialer(self._rules, forbidden, resolve, connect, self._patience.connect_s)
        self.meter = Meter(egress)
        self._secrets = {
            header.env: _checked(header.env, (secrets or {}).get(header.env))
            for header in egress.headers
        }
        self._on_ask = on_ask
        self._on_event = on_event
        self._open: set[anyio.CancelScope] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._closed = False

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; it is closed then, whatever happens."""
        full = None
        if len(self._open) >= self._egress.max_connections:
            full = f"this sandbox has {self._egress.max_connections} connections open, and no more"
        visit = Visit(self._refusal, self._dialer, self.meter, self._bound, self._patience)
        scope = anyio.CancelScope()
        self._open.add(scope)
        self._none_open.clear()
        try:
            with scope:
                if not self._closed:
                    await visit.run(connection, full)
        finally:
            connection.abort()
            try:
                await self._tell(visit.decision())
            finally:
                self._open.discard(scope)
                if not self._open:
                    self._none_open.set()

    async def aclose(self) -> None:
        """End all connections and take no more. Safe to call twice."""
        self._closed = True
        for scope in self._open:
            scope.cancel()
        await self._none_open.wait()

    async def _refusal(self, target: Target) -> str | None:
        if refusal := self._rules.refusal(target):
            return refusal
        return await self._on_ask(target) if self._on_ask else None

    def _bound(self, target: Target) -> tuple[Header, ...]:
        headers = self._rules.headers(target)
        return tuple((header.name, self._secrets[header.env]) for header in headers)

    async def _tell(self, decision: Decision) -> None:
        if self._on_event and (told := self._on_event(decision)) is not None:
            assert inspect.isawaitable(told)
            with anyio.move_on_after(_LISTENER_S, shield=True):
                await told


def _checked(variable: str, value: str | None) -> str:
    if not value or not (value.isascii() and value.isprintable()):
        raise ValueError(
            f"the environment variable {variable} holds no value that a header can carry"
        )
    return value
