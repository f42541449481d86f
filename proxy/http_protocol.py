"""How HTTP is read and written: by httptools, which takes half of h11's time, with what it lacks
beside it: bounds on what a client may leave unfinished, and on how many connections are open."""

import asyncio
import logging
import math
import resource
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any
from weakref import WeakValueDictionary

import httptools
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from proxy.api.dependencies import told, with_request_id
from proxy.coalescing import CoalescingTransport
from proxy.errors import TooManyConnectionsError
from sandbox_runtime.clock import Clock

log = logging.getLogger(__name__)

MAX_IDLE_BYTES = 64 * 1024
"""Of a head, or of trailers, that does not come to an end; as h11 has it."""
MAX_PIPELINED = 64
"""Requests that a client may send before the first of them is answered. Without a bound, one
connection filled 60 MB a second."""
HEAD_S = 20.0
"""How long a request's head may take: from the connection's beginning, or, on a kept connection,
from the head's first byte."""
BODY_S = 30.0
"""Longest pause in a body."""
MIN_BYTES_PER_S = 500
"""Least bytes a second, of a body or of an answer, that extend a pause: a client that sends or
takes a byte now and then would keep the connection for ever."""
IDLE_S = 120.0
"""How long a connection is kept for another request. Clients should be the ones who close: a
request that is sent just as the server closes is lost. Go's and reqwest's pools keep a connection
for 90 s, nginx and AWS's balancers for 60, Java's for 30, aiohttp's for 15, httpx's for 5."""
TAKE_S = 600.0
"""Longest pause in which a client takes nothing of its answer while some of it waits to be sent."""
HEADROOM = 32
"""Connections beyond the bound, for requests that are always answered, and for refusals."""
ALWAYS_ANSWERED = frozenset({b"/health", b"/metrics"})
"""Paths that are answered however many connections are open."""


def most_connections(wanted: int, files: int) -> int:
    """Return how many connections may be open where the process may open so many files: half of
    them are for everything else."""
    if files == resource.RLIM_INFINITY:
        return wanted
    most = min(wanted, max(1, files // 2 - HEADROOM))
    if most < wanted:
        log.warning(
            "at most %d connections of clients, not server.max_connections (%d): the process may"
            " open %d files only (RLIMIT_NOFILE)",
            most,
            wanted,
            files,
        )
    return most


def is_this_machine(address: str) -> bool:
    """Return True for a loopback address."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def _client(address: str) -> str:
    """Return what stands for the clients of an address: of IPv6 the network, where one client may
    have any address."""
    found = ip_address(address)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Network((int(found) >> 64 << 64, 64)))
    return address


class _Connections:
    """Connections with one bound: those of all clients, or of one address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.open: set[HTTPProtocol] = set()
        self.waiting: OrderedDict[HTTPProtocol, None] = OrderedDict()
        """Connections without a request in progress, longest-waiting first."""

    @property
    def is_far_over(self) -> bool:
        """Return True if there are more than a few too many."""
        return len(self.open) > self._most + HEADROOM

    def make_room(self) -> bool:
        """Return True if one more request may be answered."""
        return len(self.open) <= self._most or self.close_one()

    def close_one(self) -> bool:
        """Close the connection that has waited longest. One whose answer is not sent yet does not
        count as waiting until `close_expired` finds it sent."""
        while self.waiting:
            connection, _ = self.waiting.popitem(last=False)
            if connection.is_idle():
                connection.abort()
                return True
        return False


class OpenConnections(ServerState):
    """All connections of clients. Above the bound a request takes the place of the connection that
    has waited longest for one; where none waits, it is refused. So it is for each address, which
    may have half of them."""

    def __init__(
        self, most: int, clock: Clock, is_many: Callable[[str], bool] = is_this_machine
    ) -> None:
        """`is_many` tells the addresses that are more than one client's, and may have all."""
        super().__init__()
        self.clock = clock
        self._share = max(1, most // 2)
        self._is_many = is_many
        self._all = _Connections(most)
        self._of_addresses: WeakValueDictionary[str, _Connections] = WeakValueDictionary()

    def bounds_of(self, address: str | None) -> tuple[_Connections, ...]:
        """Return the connections with which one from that address shares a bound."""
        if address is None or self._is_many(address):
            return (self._all,)
        return (
            self._all,
            self._of_addresses.setdefault(_client(address), _Connections(self._share)),
        )

    def enter(self, connection: "HTTPProtocol") -> None:
        """Take in a new connection. Far above a bound, the one that has waited longest is closed,
        which is the new one if all others have a request."""
        for each in connection.bounds:
            each.open.add(connection)
            each.waiting[connection] = None
        for each in connection.bounds:
            if each.is_far_over:
                each.close_one()

    def wait(self, connection: "HTTPProtocol") -> None:
        """Note that a connection waits for its client's next request."""
        for each in connection.bounds:
            each.waiting[connection] = None

    def begin(self, connection: "HTTPProtocol") -> None:
        """Note that a connection waits no longer."""
        for each in connection.bounds:
            each.waiting.pop(connection, None)

    def make_room(self, connection: "HTTPProtocol") -> bool:
        """Return True if one more request may be answered on that connection."""
        for each in connection.bounds:  # noqa: SIM110 - on the way of every request
            if not each.make_room():
                return False
        return True

    def leave(self, connection: "HTTPProtocol") -> None:
        """Forget a connection that is closed. Safe to call twice."""
        for each in connection.bounds:
            each.open.discard(connection)
            each.waiting.pop(connection, None)

    def close_expired(self) -> None:
        """Close the connections whose clients have let their time pass. Those that have sent all of
        their answers wait again."""
        now = self.clock.time()
        closed = 0
        for connection in list(self._all.open):
            if connection.is_expired(now):
                connection.abort()
                closed += 1
            elif connection.is_idle():
                for each in connection.bounds:
                    each.waiting.setdefault(connection)
        if closed:
            log.info("%d connections closed: their clients were too slow", closed)


class HTTPProtocol(HttpToolsProtocol):
    """One connection of a client."""

    server_state: OpenConnections

    def __init__(
        self,
        config: Config,
        server_state: OpenConnections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.bounds: tuple[_Connections, ...] = ()
        """The connections with which this one shares a bound."""
        self._idle_bytes = 0
        """What has come since anything did that a request is made of."""
        self._is_in_head = False
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the last that came."""
        self._expires_at = math.inf
        """When the connection is closed unless the client sends what is awaited."""
        self._out: CoalescingTransport
        self._taken_bytes = 0
        """Bytes of answers that the client had taken at the last look."""
        self._stalls_at = math.inf
        """When the connection is closed unless the client takes more of its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See asyncio."""
        self._out = CoalescingTransport(transport)
        super().connection_made(self._out)
        self._expire_in(HEAD_S)
        self.bounds = self.server_state.bounds_of(self.client[0] if self.client else None)
        self.server_state.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.server_state.leave(self)
        super().connection_lost(exc)
        if self._running and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Take in what the client sends."""
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse("Invalid HTTP request received.")
        else:
            if self._idle_bytes > MAX_IDLE_BYTES:
                self._refuse("Request header fields too large.")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._is_in_head = True
        if self.cycle and self.cycle.response_complete:
            self._expire_in(HEAD_S)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._idle_bytes = 0
        self._is_in_head = False
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests before the first is answered")
        is_first = not self._is_answering()
        self.server_state.begin(self)
        always = self.url.partition(b"?")[0] in ALWAYS_ANSWERED
        has_room = always or self.server_state.make_room(self)
        self.app = self.config.loaded_app if has_room else self._refuse_for_room
        super().on_headers_complete()
        if is_first:
            self._running = self.cycle
            self._expire_in(BODY_S)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._idle_bytes = 0
        super().on_body(body)
        if self._is_answering() and not self.pipeline:
            patience = self._expires_at + len(body) / MIN_BYTES_PER_S
            self._expires_at = min(patience, self.server_state.clock.time() + BODY_S)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._idle_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self._is_answering():
            self._expires_at = math.inf

    def on_response_complete(self) -> None:
        """Begin with the next request, or wait for it."""
        self.server_state.total_requests += 1
        if self not in self.connections:
            return
        if self.pipeline and not self.transport.is_closing():
            cycle, app = self.pipeline.pop()
            self._running = cycle
            self._expires_at = math.inf
            if not self.pipeline and cycle.more_body:
                self._expire_in(BODY_S)
            self._start_asgi_task(cycle, app)
            return
        self.flow.resume_reading()
        self._expire_in(HEAD_S if self._is_in_head else IDLE_S)
        self.server_state.wait(self)

    def is_expired(self, now: float) -> bool:
        """Return True if the client has let its time pass. One that takes its answer lets none."""
        if self._out.get_write_buffer_size():
            return self._is_stalled(now)
        self._stalls_at = math.inf
        if self._expires_at == math.inf or (self._is_answering() and self.cycle.response_started):
            return False
        if self._is_kept_waiting():
            self._expire_in(BODY_S)
            return False
        return now >= self._expires_at

    def _is_stalled(self, now: float) -> bool:
        """Return True if the client takes its answer too slowly, some of which waits to be sent."""
        taken = self._out.taken_bytes
        patience = self._stalls_at + (taken - self._taken_bytes) / MIN_BYTES_PER_S
        self._taken_bytes, self._stalls_at = taken, min(patience, now + TAKE_S)
        return now >= self._stalls_at

    def is_idle(self) -> bool:
        """Return True if no request is in progress and all answers are sent."""
        return not self._is_answering() and not self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once."""
        # Told of the end in the loop's next turn only, and others are counted in this one.
        self.connections.discard(self)
        self.server_state.leave(self)
        self.transport.abort()

    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def _is_kept_waiting(self) -> bool:
        """Return True if the client may not send its body yet."""
        asks_first = self._is_answering() and self.cycle.waiting_for_100_continue
        return asks_first or self.flow.read_paused

    def _expire_in(self, seconds: float) -> None:
        self._expires_at = self.server_state.clock.time() + seconds

    def _feed(self, data: bytes) -> None:
        """The client may offer another protocol, as Java's does with HTTP/2: httptools takes what
        follows for that one, a body too, but nobody has accepted. So the request is read once more
        without the offer."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if self._is_answering():
                raise
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head + data[offered.args[0] :])

    def _head_without_offer(self) -> bytes:
        """It is one only where the header `Connection` names it, or what httptools takes for it."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name in (b"connection", b"proxy-connection"):
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(each for each in options if each.lower() != b"upgrade")
            head += (name, b": ", value, b"\r\n")
        return b"".join([*head, b"\r\n"])

    def _refuse(self, words: str) -> None:
        self.logger.warning(words)
        self.send_400_response(words)

    async def _refuse_for_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = TooManyConnectionsError()
        # Closed before the whole body has come it would be reset, and the answer lost.
        if not self.cycle.more_body:
            error.headers["Connection"] = "close"
        await told(Request(scope), error)(scope, receive, with_request_id(scope, send))
