"""One connection of a program, from its first byte to its last."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import anyio

from policies.egress import HTTP_PORT
from policies.hosts import Target
from sandbox_runtime.egress import http_proxy, socks
from sandbox_runtime.egress.ask import Ask
from sandbox_runtime.egress.client_hello import ACCESS_DENIED
from sandbox_runtime.egress.connection import Connection, Inbox
from sandbox_runtime.egress.decision import Decision, OnAsk
from sandbox_runtime.egress.dialer import Dialer
from sandbox_runtime.egress.errors import DeniedError, EgressError, HelloError
from sandbox_runtime.egress.exchange import exchange, read_request
from sandbox_runtime.egress.meter import Meter
from sandbox_runtime.egress.patience import Patience
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay
from sandbox_runtime.egress.request_head import Header
from sandbox_runtime.egress.tunnel import tunnel

Bound = Callable[[Target], tuple[Header, ...]]
"""The headers that are added to plain HTTP requests to a target."""


class Visit:
    """Understand it, decide, do it."""

    def __init__(
        self, refusal: OnAsk, dialer: Dialer, meter: Meter, bound: Bound, patience: Patience
    ) -> None:
        self._why_not = refusal
        self._dialer = dialer
        self._meter = meter
        self._bound = bound
        self._patience = patience
        self._started = asyncio.get_running_loop().time()
        self._target: Target | None = None
        self._relay: Relay | None = None
        self._in_tunnel = False
        self._refusal = http_proxy.refusal
        self._denied = True
        self._reason = "ended with the sandbox"

    async def run(self, connection: Connection, full: str | None) -> None:
        """Serve it; `full` says why there is no room for it, if so."""
        inbox = Inbox(connection)
        try:
            await self._serve(connection, inbox, full)
            self._reason = ""
        except EgressError as error:
            self._denied = isinstance(error, DeniedError)
            self._reason = str(error)
            await self._refuse(connection, inbox, error)
        except ConnectionError:
            self._reason = "" if self._relay else "the program left before it had an answer"

    def decision(self) -> Decision:
        """What became of it, so far."""
        return Decision(
            host=self._target.host if self._target else "",
            port=self._target.port if self._target else 0,
            verdict="denied" if self._denied else "allowed",
            reason=self._reason,
            bytes_up=self._relay.bytes_up if self._relay else 0,
            bytes_down=self._relay.bytes_down if self._relay else 0,
            duration_s=asyncio.get_running_loop().time() - self._started,
        )

    async def _serve(self, connection: Connection, inbox: Inbox, full: str | None) -> None:
        ask = await self._patience.for_head(self._read_ask(connection, inbox))
        self._target = ask.target
        if full:
            raise DeniedError(full, 503)
        if refusal := await self._why_not(ask.target):
            raise DeniedError(refusal)
        self._meter.check()
        server = await self._dialer.dial(ask.target)
        self._denied = False
        relay = self._relay = Relay(connection, inbox, server, self._meter, self._patience)
        try:
            await connection.send(ask.granted)
            self._refusal = http_proxy.refusal
            await self._pass(relay, ask)
            await relay.close()
        finally:
            relay.abort()

    async def _read_ask(self, connection: Connection, inbox: Inbox) -> Ask:
        if await inbox.peek() == socks.FIRST_BYTE:
            self._refusal = socks.refusal
            return await socks.read_ask(inbox, connection)
        return await http_proxy.read_ask(inbox)

    async def _pass(self, relay: Relay, ask: Ask) -> None:
        request = ask.request
        if not request and ask.target.port == HTTP_PORT:
            # Inside a tunnel too, a Host header must not lead elsewhere than the rules looked.
            request = await self._patience.for_head(read_request(relay.inbox, ask.target))
        if request:
            await exchange(relay, request, ask.target, self._bound(ask.target))
        else:
            self._in_tunnel = True
            await tunnel(relay, ask.target, self._patience)

    async def _refuse(self, connection: Connection, inbox: Inbox, error: EgressError) -> None:
        relay = self._relay
        if relay and (relay.bytes_down or (relay.bytes_up and self._in_tunnel)):
            return  # in the middle of something else, words would be taken for a part of it
        words = ACCESS_DENIED if isinstance(error, HelloError) else self._refusal(error)
        # Read on for a while: to close on unread data would take the words back.
        with suppress(ConnectionError), anyio.move_on_after(self._patience.linger_s):
            await connection.finish(words)
            while await inbox.some(PIECE_BYTES):
                pass
