"""The egress gateway of a leased sandbox, which allows or denies each connection of a program and
relays it; `EgressGateways` makes one gateway for each lease."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import anyio

from policies.egress import HTTP_PORT, Egress, EgressRules
from policies.hosts import Target
from sandbox_runtime.egress.connection import BufferedReader, Connection
from sandbox_runtime.egress.decision import (
    CheckTarget,
    Decision,
    DeniedError,
    EgressError,
    HelloError,
    OnDecision,
)
from sandbox_runtime.egress.dialer import (
    Connect,
    Dialer,
    Endpoint,
    Resolve,
    SystemResolver,
    open_connection,
)
from sandbox_runtime.egress.http1 import Header, exchange, read_tunnelled_request
from sandbox_runtime.egress.limits import Timeouts, TrafficQuota
from sandbox_runtime.egress.proxy_request import (
    SOCKS_VERSION,
    ErrorReply,
    ProxyRequest,
    http_error,
    read_http,
    read_socks,
    socks_error,
)
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay
from sandbox_runtime.egress.tls_tunnel import ACCESS_DENIED, tunnel

_CALLBACK_S = 5.0
"""Maximum time that the gateway waits for `on_decision`."""


class EgressGateways:
    """Makes the gateway of each lease, with the settings that all gateways share.

    `forbidden` are addresses that no rule allows: the proxy's own and its backends'. `secrets` are
    the environment variables that `egress.headers` may name, with their values.
    """

    def __init__(
        self,
        *,
        forbidden: Collection[Endpoint] = (),
        secrets: Mapping[str, str] | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._forbidden = forbidden
        self._secrets = secrets
        self._resolve = resolve or SystemResolver()

    def check(self, egress: Egress) -> None:
        """Raise ValueError if the rules cannot be enforced."""
        self.create(egress)

    def create(
        self,
        egress: Egress,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
    ) -> "Gateway":
        """Return the gateway of one lease. Raises ValueError if the rules cannot be enforced."""
        return Gateway(
            egress,
            resolve=self._resolve,
            forbidden=self._forbidden,
            secrets=self._secrets,
            check_target=check_target,
            on_decision=on_decision,
        )


class Gateway:
    """Allows or denies the connections of one leased sandbox, and relays those that it allows."""

    def __init__(
        self,
        egress: Egress,
        *,
        resolve: Resolve,
        connect: Connect = open_connection,
        forbidden: Collection[Endpoint] = (),
        secrets: Mapping[str, str] | None = None,
        check_target: CheckTarget | None = None,
        on_decision: OnDecision | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`forbidden` are addresses that no rule allows: the proxy's own and its backends'.
        `secrets` are the environment variables that `egress.headers` may name, with their values.
        Raises ValueError if a rule is invalid, or if a named variable has no usable value."""
        self._egress = egress
        self._rules = EgressRules(egress)
        self._timeouts = timeouts or Timeouts()
        self._dialer = Dialer(self._rules, forbidden, resolve, connect, self._timeouts.connect_s)
        self.traffic = TrafficQuota(egress)
        self._secrets = {
            header.env: _header_value(header.env, (secrets or {}).get(header.env))
            for header in egress.headers
        }
        self._check_target = check_target
        self._on_decision = on_decision
        self._scopes: set[anyio.CancelScope] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._is_closed = False

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end, and close it."""
        refusal = None
        if len(self._scopes) >= self._egress.max_connections:
            limit = self._egress.max_connections
            refusal = f"this sandbox has {limit} connections open, which is its limit"
        handler = _ConnectionHandler(
            self._refusal_of, self._dialer, self.traffic, self._headers_for, self._timeouts
        )
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        self._all_ended.clear()
        try:
            with scope:
                if not self._is_closed:
                    await handler.run(connection, refusal)
        finally:
            connection.abort()
            try:
                await self._report(handler.decision())
            finally:
                self._scopes.discard(scope)
                if not self._scopes:
                    self._all_ended.set()

    async def aclose(self) -> None:
        """End all connections and accept no more. Safe to call twice."""
        self._is_closed = True
        for scope in self._scopes:
            scope.cancel()
        await self._all_ended.wait()

    async def _refusal_of(self, target: Target) -> str | None:
        """Return why the target is denied, or None if it is allowed."""
        if reason := self._rules.refusal(target):
            return reason
        return await self._check_target(target) if self._check_target else None

    def _headers_for(self, target: Target) -> tuple[Header, ...]:
        headers = self._rules.headers_for(target)
        return tuple((header.name, self._secrets[header.env]) for header in headers)

    async def _report(self, decision: Decision) -> None:
        if self._on_decision and (waiting := self._on_decision(decision)) is not None:
            assert inspect.isawaitable(waiting)
            with anyio.move_on_after(_CALLBACK_S, shield=True):
                await waiting


def _header_value(variable: str, value: str | None) -> str:
    if not value or not (value.isascii() and value.isprintable()):
        raise ValueError(
            f"the environment variable {variable} holds no value that a header can carry"
        )
    return value


class _ConnectionHandler:
    """Serves one connection of a program: reads the request, allows or denies it, and relays."""

    def __init__(
        self,
        check_target: CheckTarget,
        dialer: Dialer,
        traffic: TrafficQuota,
        headers_for: Callable[[Target], tuple[Header, ...]],
        timeouts: Timeouts,
    ) -> None:
        self._check_target = check_target
        self._dialer = dialer
        self._traffic = traffic
        self._headers_for = headers_for
        self._timeouts = timeouts
        self._started_at = asyncio.get_running_loop().time()
        self._target: Target | None = None
        self._relay: Relay | None = None
        self._is_tunnelling = False
        self._error_reply: ErrorReply = http_error
        self._is_denied = True
        self._reason = "the sandbox ended"

    async def run(self, connection: Connection, refusal: str | None) -> None:
        """Serve the connection. If `refusal` is not None, read the request and deny it for this
        reason."""
        reader = BufferedReader(connection)
        try:
            await self._serve(connection, reader, refusal)
            self._reason = ""
        except EgressError as error:
            self._is_denied = isinstance(error, DeniedError)
            self._reason = str(error)
            await self._refuse(connection, reader, error)
        except ConnectionError:
            self._reason = (
                "" if self._relay else "the program closed the connection before the reply"
            )

    def decision(self) -> Decision:
        """Return the decision on the connection, with the bytes relayed so far."""
        return Decision(
            host=self._target.host if self._target else "",
            port=self._target.port if self._target else 0,
            verdict="denied" if self._is_denied else "allowed",
            reason=self._reason,
            bytes_up=self._relay.bytes_up if self._relay else 0,
            bytes_down=self._relay.bytes_down if self._relay else 0,
            duration_s=asyncio.get_running_loop().time() - self._started_at,
        )

    async def _serve(
        self, connection: Connection, reader: BufferedReader, refusal: str | None
    ) -> None:
        request = await self._timeouts.wait_for_head(self._read_request(connection, reader))
        target = self._target = request.target
        if refusal:
            raise DeniedError(refusal, 503)
        if reason := await self._check_target(target):
            raise DeniedError(reason)
        self._traffic.check()
        server = await self._dialer.dial(target)
        self._is_denied = False
        relay = self._relay = Relay(connection, reader, server, self._traffic, self._timeouts)
        try:
            await connection.send(request.success_reply)
            self._error_reply = http_error
            await self._relay_request(relay, request)
            await relay.close()
        finally:
            relay.abort()

    async def _read_request(self, connection: Connection, reader: BufferedReader) -> ProxyRequest:
        if await reader.peek() == SOCKS_VERSION:
            self._error_reply = socks_error
            return await read_socks(reader, connection)
        return await read_http(reader)

    async def _relay_request(self, relay: Relay, request: ProxyRequest) -> None:
        target, head = request.target, request.head
        if not head and target.port == HTTP_PORT:
            # In a tunnel, too, the Host header must name the target that the rules allowed.
            head = await self._timeouts.wait_for_head(
                read_tunnelled_request(relay.program_reader, target)
            )
        if head:
            await exchange(relay, head, target, self._headers_for(target))
        else:
            self._is_tunnelling = True
            await tunnel(relay, target, self._timeouts)

    async def _refuse(
        self, connection: Connection, reader: BufferedReader, error: EgressError
    ) -> None:
        relay = self._relay
        if relay and (relay.bytes_down or (relay.bytes_up and self._is_tunnelling)):
            return  # the program would take the reply for a part of the response
        reply = ACCESS_DENIED if isinstance(error, HelloError) else self._error_reply(error)
        # Closing with unread data would discard the reply: read on for a while.
        with suppress(ConnectionError), anyio.move_on_after(self._timeouts.linger_s):
            await connection.finish(reply)
            while await reader.read(PIECE_BYTES):
                pass
