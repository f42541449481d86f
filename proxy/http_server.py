"""The HTTP server: uvicorn with limits on connections, and a shutdown that answers the requests.

`HTTPServer` is uvicorn's server with a graceful shutdown. `HTTPProtocol` is one connection. It
limits the time and size of incomplete requests, the time for which a response stays unread, and the
time for which the connection is idle. `ConnectionRegistry` limits the number of connections.
`CoalescingTransport` sends the writes of one iteration of the event loop together.

uvicorn's httptools protocol is extended, because httptools takes half of h11's time (decision
0028), and uvicorn limits only the number of connections and the keep-alive time.
tests/proxy/test_connections.py tests the time limits, test_connection_bounds.py the connection and
pipelining limits, tests/clients/test_http_protocol.py the parser's limits and the upgrade offers,
and tests/proxy/test_coalescing.py the transport.
"""

import asyncio
import logging
import math
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, IPv6Network, ip_address
from socket import socket
from typing import Any
from weakref import WeakValueDictionary

import httptools
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from policies.headers import ResponseHeader
from proxy.api.dependencies import error_response, with_request_id
from proxy.errors import ServerStoppingError, TooManyConnectionsError
from proxy.runs.manager import RunManager
from sandbox_runtime.clock import Clock

log = logging.getLogger(__name__)

MAX_INCOMPLETE_BYTES = 64 * 1024
"""Maximum size of an incomplete request head or incomplete trailers; h11 has the same limit."""
MAX_PIPELINED = 64
"""Maximum number of pipelined requests. Without this limit, one connection filled 60 MB of memory
per second."""
HEAD_S = 20.0
"""Time limit for a request head, from the start of the connection or, on a reused connection, from
the head's first byte."""
BODY_S = 30.0
"""Maximum pause within a request body, in seconds."""
MIN_BYTES_PER_S = 500
"""Minimum rate of a body or a response: each received or sent byte extends the time limit by
1 / MIN_BYTES_PER_S seconds, so a single byte now and then does not keep a connection open."""
IDLE_S = 120.0
"""Time limit for an idle connection. It is longer than the clients' own limits, because a request
that is sent while the server closes the connection is lost. Go's and reqwest's pools keep a
connection for 90 s, nginx and AWS's balancers for 60, Java's for 30, aiohttp's for 15, httpx's for
5."""
READ_S = 600.0
"""Maximum time for which a client may read nothing of its response, in seconds."""
HEADROOM = 32
"""Number of connections that are accepted above the limit, for requests to `ALWAYS_ANSWERED` and
for refusals."""
ALWAYS_ANSWERED = frozenset({b"/health", b"/health/live", b"/health/ready", b"/metrics"})
"""Paths that the connection limit does not apply to."""
MAX_HELD_BYTES = 64 * 1024
"""Maximum number of bytes that `CoalescingTransport` buffers. Further writes go at once to the
underlying transport, whose flow control then pauses the writer."""
REQUEST_SHUTDOWN_S = 1.5
"""Maximum seconds that a request may continue after the end of the runs, so that the client
receives the end of its run."""
CONNECTION_SHUTDOWN_S = 2
"""uvicorn closes the remaining connections this many seconds after the end of the runs."""
TICKS_PER_CHECK = 10
"""Number of uvicorn's ticks (10 per second) between two checks for expired connections."""


def connection_limit(configured_limit: int, max_open_files: int) -> int:
    """Return the maximum number of client connections: `configured_limit`, but at most about half
    of the `max_open_files` that the process may open. Sandboxes and the backend need the other
    half."""
    if max_open_files == resource.RLIM_INFINITY:
        return configured_limit
    most = min(configured_limit, max(1, max_open_files // 2 - HEADROOM))
    if most < configured_limit:
        log.warning(
            "server.max_connections is lowered to %d (configured: %d): the process may open only"
            " %d files; raise RLIMIT_NOFILE",
            most,
            configured_limit,
            max_open_files,
        )
    return most


def is_loopback(address: str) -> bool:
    """Return True for a loopback address."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def _address_key(address: str) -> str:
    """Return the key under which the connections of an address are counted. For an IPv6 address,
    the key is the /64 network, which one client may own."""
    found = ip_address(address)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Network((int(found) >> 64 << 64, 64)))
    return address


class _ConnectionGroup:
    """The connections of all clients, or of one address, which have a common limit."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self.open_connections: set[HTTPProtocol] = set()
        self.idle_connections: OrderedDict[HTTPProtocol, None] = OrderedDict()
        """Idle connections, longest idle first."""

    @property
    def exceeds_headroom(self) -> bool:
        """True if the number of connections exceeds the limit by more than the headroom."""
        return len(self.open_connections) > self._max_connections + HEADROOM

    def make_room(self) -> bool:
        """Return True if one more request may be answered. Close an idle connection if needed."""
        return len(self.open_connections) <= self._max_connections or self.close_longest_idle()

    def close_excess(self) -> None:
        """Close the connection that has been idle longest if the headroom is exceeded."""
        if self.exceeds_headroom:
            self.close_longest_idle()

    def close_longest_idle(self) -> bool:
        """Close the connection that has been idle longest. Return False if none is idle. A
        connection with unsent bytes is not idle; `close_expired` marks it as idle once the bytes
        are sent."""
        while self.idle_connections:
            connection, _ = self.idle_connections.popitem(last=False)
            if connection.is_idle():
                connection.abort()
                return True
        return False


class ConnectionRegistry(ServerState):
    """All connections of clients, with limits in total and per address.

    Above a limit, a request closes the connection that has been idle longest. If none is idle, the
    request is refused. One address may have half of all connections.
    """

    def __init__(
        self, max_connections: int, clock: Clock, is_shared: Callable[[str], bool] = is_loopback
    ) -> None:
        """`is_shared` returns True for an address of many clients, such as a reverse proxy. Such an
        address has no limit of its own."""
        super().__init__()
        self.clock = clock
        self._max_per_address = max(1, max_connections // 2)
        self._is_shared = is_shared
        self._all_connections = _ConnectionGroup(max_connections)
        self._groups_by_address: WeakValueDictionary[str, _ConnectionGroup] = WeakValueDictionary()

    def groups_of(self, address: str | None) -> tuple[_ConnectionGroup, ...]:
        """Return the groups to which a connection from the address belongs."""
        if address is None or self._is_shared(address):
            return (self._all_connections,)
        return (
            self._all_connections,
            self._groups_by_address.setdefault(
                _address_key(address), _ConnectionGroup(self._max_per_address)
            ),
        )

    def add(self, connection: "HTTPProtocol") -> None:
        """Add a new connection, which is idle until its first request.

        If the number of connections exceeds a limit by more than `HEADROOM`, the connection that
        has been idle longest is closed shortly afterwards. This may be the new connection.
        """
        loop = asyncio.get_running_loop()
        for each in connection.groups:
            each.open_connections.add(connection)
            each.idle_connections[connection] = None
            if each.exceeds_headroom:
                # The loop accepts a burst of connections in one pass, and reads from them in the
                # next one. Only then is it known which of them are idle.
                loop.call_soon(loop.call_soon, each.close_excess)

    def mark_idle(self, connection: "HTTPProtocol") -> None:
        """Mark a connection as idle."""
        for each in connection.groups:
            each.idle_connections[connection] = None

    def mark_active(self, connection: "HTTPProtocol") -> None:
        """Mark a connection as having a request."""
        for each in connection.groups:
            each.idle_connections.pop(connection, None)

    def make_room(self, connection: "HTTPProtocol") -> bool:
        """Return True if one more request may be answered on the connection. Close idle connections
        if needed."""
        for each in connection.groups:  # noqa: SIM110 - a loop is faster, and every request needs it
            if not each.make_room():
                return False
        return True

    def remove(self, connection: "HTTPProtocol") -> None:
        """Remove a closed connection. Idempotent."""
        for each in connection.groups:
            each.open_connections.discard(connection)
            each.idle_connections.pop(connection, None)

    def close_expired(self) -> None:
        """Close the connections whose clients exceed a time limit. Mark as idle the connections
        whose responses have been sent since the last check."""
        now = self.clock.time()
        closed = 0
        for connection in list(self._all_connections.open_connections):
            if connection.is_expired(now):
                connection.abort()
                closed += 1
            elif connection.is_idle():
                for each in connection.groups:
                    each.idle_connections.setdefault(connection)
        if closed:
            log.info("closed %d connections whose clients exceeded a time limit", closed)


class HTTPProtocol(HttpToolsProtocol):
    """One connection of a client."""

    server_state: ConnectionRegistry

    def __init__(
        self,
        config: Config,
        server_state: ConnectionRegistry,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.groups: tuple[_ConnectionGroup, ...] = ()
        """The groups whose limits apply to this connection."""
        self._incomplete_bytes = 0
        """Bytes received since the last complete head, body piece or message."""
        self._is_in_head = False
        self._current_cycle: RequestResponseCycle | None = None
        """The request that is being answered, or the request that was answered last. `cycle` is the
        request that was received last."""
        self._expires_at = math.inf
        """Time at which the connection is closed, unless the client sends more."""
        self._coalescing_transport: CoalescingTransport
        self._taken_bytes = 0
        """`CoalescingTransport.bytes_accepted_by_kernel` at the last check."""
        self._stalls_at = math.inf
        """Time at which the connection is closed, unless the client reads more of its response."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self._coalescing_transport = CoalescingTransport(transport)
        super().connection_made(self._coalescing_transport)
        self._expire_in(HEAD_S)
        self.groups = self.server_state.groups_of(self.client[0] if self.client else None)
        self.server_state.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.remove(self)
        super().connection_lost(exc)
        if self._current_cycle and not self._current_cycle.response_complete:
            self._current_cycle.disconnected = True
            self._current_cycle.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._incomplete_bytes += len(data)
        try:
            self._feed_without_upgrade_offer(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse("Invalid HTTP request received.")
        else:
            if self._incomplete_bytes > MAX_INCOMPLETE_BYTES:
                self._refuse("Request header fields too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        if self.cycle and self.cycle.response_complete:
            self._expire_in(HEAD_S)

    def on_headers_complete(self) -> None:
        self._incomplete_bytes = 0
        self._is_in_head = False
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests before the first is answered")
        is_first = not self._is_answering()
        self.server_state.mark_active(self)
        always = self.url.partition(b"?")[0] in ALWAYS_ANSWERED
        has_room = always or self.server_state.make_room(self)
        self.app = self.config.loaded_app if has_room else self._refuse_too_many_connections
        super().on_headers_complete()
        if is_first:
            self._current_cycle = self.cycle
            self._expire_in(BODY_S)

    def on_body(self, body: bytes) -> None:
        self._incomplete_bytes = 0
        super().on_body(body)
        if self._is_answering() and not self.pipeline:
            extended = self._expires_at + len(body) / MIN_BYTES_PER_S
            self._expires_at = min(extended, self.server_state.clock.time() + BODY_S)

    def on_message_complete(self) -> None:
        self._incomplete_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self._is_answering():
            self._expires_at = math.inf

    def on_response_complete(self) -> None:
        """See uvicorn. Start the next pipelined request, or wait for a new request."""
        self.server_state.total_requests += 1
        if self not in self.connections:
            return
        if self.pipeline and not self.transport.is_closing():
            cycle, app = self.pipeline.pop()
            self._current_cycle = cycle
            self._expires_at = math.inf
            if not self.pipeline and cycle.more_body:
                self._expire_in(BODY_S)
            self._start_asgi_task(cycle, app)
            return
        self.flow.resume_reading()
        self._expire_in(HEAD_S if self._is_in_head else IDLE_S)
        self.server_state.mark_idle(self)

    def is_expired(self, now: float) -> bool:
        """Return True if the client exceeds a time limit for its request or for its response."""
        if self._coalescing_transport.get_write_buffer_size():
            return self._is_stalled(now)
        self._stalls_at = math.inf
        is_answering = self._is_answering()
        if self._expires_at == math.inf or (is_answering and self.cycle.response_started):
            return False
        waits_for_100 = is_answering and self.cycle.waiting_for_100_continue
        if waits_for_100 or self.flow.read_paused:  # the client may not send its body yet
            self._expire_in(BODY_S)
            return False
        return now >= self._expires_at

    def _is_stalled(self, now: float) -> bool:
        """Return True if the client reads its response too slowly."""
        taken = self._coalescing_transport.bytes_accepted_by_kernel
        extended = self._stalls_at + (taken - self._taken_bytes) / MIN_BYTES_PER_S
        self._taken_bytes, self._stalls_at = taken, min(extended, now + READ_S)
        return now >= self._stalls_at

    def is_idle(self) -> bool:
        """Return True if no request is in progress and all responses are sent."""
        return not self._is_answering() and not self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once."""
        # asyncio calls `connection_lost` later, but the connection must not count from now on.
        self.connections.discard(self)
        self.server_state.remove(self)
        self.transport.abort()

    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def _expire_in(self, seconds: float) -> None:
        self._expires_at = self.server_state.clock.time() + seconds

    def _feed_without_upgrade_offer(self, data: bytes) -> None:
        """Parse data, and ignore an offer to switch protocols, such as Java's HTTP/2 offer.

        After an offer, httptools treats all further bytes as the other protocol, even a body,
        although the server has not accepted the offer. So the head is parsed again without the
        offer."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if self._is_answering():
                raise
            head = self._head_without_upgrade_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head + data[offered.args[0] :])

    def _head_without_upgrade_offer(self) -> bytes:
        """Return the request head without the option `upgrade` in the headers `Connection` and
        `Proxy-Connection`, which httptools treats alike. Without this option, the header `Upgrade`
        has no effect."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name in (b"connection", b"proxy-connection"):
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(each for each in options if each.lower() != b"upgrade")
            head += (name, b": ", value, b"\r\n")
        return b"".join([*head, b"\r\n"])

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        self.send_400_response(message)

    async def _refuse_too_many_connections(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        error = TooManyConnectionsError()
        # Closing the connection before the whole body has arrived would reset it, and the response
        # would be lost.
        if not self.cycle.more_body:
            error.headers[ResponseHeader.CONNECTION] = "close"
        await error_response(Request(scope), error)(scope, receive, with_request_id(scope, send))


class CoalescingTransport(asyncio.Transport):
    """A transport that sends the writes of one iteration of the event loop together, such as the
    head and the body of a response. Each separate write costs client and server a system call and
    an iteration of the event loop. That is a tenth of the time of a short response
    (`bench/relay.py`)."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held_writes: list[bytes] = []
        self._held_bytes = 0
        self._passed_bytes = 0

    @property
    def bytes_accepted_by_kernel(self) -> int:
        """Number of the written bytes that the kernel has accepted."""
        return self._passed_bytes - self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held_bytes + len(data) > MAX_HELD_BYTES:
            self._send()
            self._passed_bytes += len(data)
            self._transport.write(data)
            return
        if not self._held_writes:
            self._loop.call_soon(self._send)
        self._held_writes.append(bytes(data))
        self._held_bytes += len(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def abort(self) -> None:
        self._held_writes.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._held_bytes + self._transport.get_write_buffer_size()

    def _send(self) -> None:
        if self._held_writes:
            self._passed_bytes += self._held_bytes
            held, self._held_writes, self._held_bytes = self._held_writes, [], 0
            self._transport.write(b"".join(held))

    # Delegated unchanged

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


class HTTPServer(uvicorn.Server):
    """uvicorn's server. Its shutdown ends the runs first, so that each client gets a response."""

    server_state: ConnectionRegistry

    def __init__(
        self, app: ASGIApp, runs: RunManager, connections: ConnectionRegistry, drain_s: float
    ) -> None:
        """Runs may continue for `drain_s` seconds after the start of the shutdown."""
        self._drain_s = drain_s
        self._app = _ShutdownMiddleware(app)
        super().__init__(
            uvicorn.Config(
                self._app,
                http=HTTPProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=math.ceil(drain_s) + CONNECTION_SHUTDOWN_S,
            )
        )
        self.server_state = connections
        self._runs = runs

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls this method ten times per second. Close expired connections once
        a second."""
        if counter % TICKS_PER_CHECK == 0:
            self.server_state.close_expired()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """See uvicorn. Accept no new connections, end the runs, then cancel the remaining
        requests."""
        timer = asyncio.get_running_loop().call_later(
            self._drain_s + REQUEST_SHUTDOWN_S, self._cancel_requests
        )
        stopping = asyncio.create_task(self._runs.stop(self._drain_s))
        await super().shutdown(sockets)
        timer.cancel()
        await stopping

    def _cancel_requests(self) -> None:
        log.warning("the server stops: %d requests are cancelled", len(self.server_state.tasks))
        self._app.is_stopping = True
        for request in self.server_state.tasks:
            request.cancel()


class _ShutdownMiddleware:
    """Sends a ServerStoppingError as the response to each request that the shutdown cancels, unless
    the response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self.is_stopping = False
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def note_and_send(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            # A response that has begun stays incomplete, and uvicorn closes the connection.
            if not has_begun:
                response = error_response(Request(scope), ServerStoppingError())
                await response(scope, receive, with_request_id(scope, send))
