"""How HTTP is read and written: by httptools, which takes half of h11's time, with what it lacks
beside it."""

import asyncio

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.coalescing import CoalescingTransport

MAX_IDLE_BYTES = 64 * 1024
"""Of a head, or of trailers, that does not come to an end; as h11 has it."""


class HTTPProtocol(HttpToolsProtocol):
    """One connection of a client."""

    _idle_bytes = 0
    """What has come since anything did that a request is made of."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See asyncio."""
        super().connection_made(CoalescingTransport(transport))

    def data_received(self, data: bytes) -> None:
        """Take in what the client sends."""
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            self._leave_to_h11(data[offered.args[0] :])
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
        else:
            if self._idle_bytes > MAX_IDLE_BYTES:
                self._refuse("Request header fields too large.")

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._idle_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._idle_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _leave_to_h11(self, rest: bytes) -> None:
        """The client offers another protocol, as Java's does with HTTP/2: httptools takes what
        follows for that one, a body too, but nobody has accepted."""
        if self.cycle and not self.cycle.response_complete:
            self._refuse("Another protocol is offered before the last request is answered.")
            return
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        head += [part for name, value in self.headers for part in (name, b": ", value, b"\r\n")]
        protocol = H11Protocol(self.config, self.server_state, self.app_state)
        self.connections.discard(self)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, words: str) -> None:
        self.logger.warning(words)
        self.send_400_response(words)
