"""Packets carry the byte stream between the host and a guest agent (the link) over a series of
connections. A connection may be lost and replaced, and two connections may overlap.

A packet contains the offset of its first byte among all bytes that its sender has sent. So the
receiver recognises bytes that it has received already, and bytes that are missing.

A connection to a guest may begin in the middle of a packet, and bytes of an earlier connection may
arrive late, even between the bytes of the next connection. Each packet therefore begins with a
random token, which nothing else contains. It ends with a trailer: the packet's connection and
offset, masked by the token. If foreign bytes are inside a packet, the trailer is not where it
should be.

The agent skips bytes that belong to no packet. The host does so only at the beginning of a
connection, because nothing can come between the packets of the agent. The agent's side is
`guest/native/packets.c`.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from sandbox_runtime.protocol import ProtocolError

TOKEN_BYTES = 16
PACKET_DATA, PACKET_END, PACKET_ADOPT = 1, 2, 3
"""The kinds of packets. Both sides send DATA. Only the host sends END, which ends the agent, and
ADOPT, with which a new host takes over the agent and both directions begin again at offset 0."""
GENERATION_SHIFT = 20
"""Position of the link's generation in a connection's number; see `Packet.connection`. The lower
bits count the connections of one host."""
MAX_GENERATION = (1 << 32 - GENERATION_SHIFT) - 1
HEADER = struct.Struct(f">{TOKEN_BYTES}sBIQQQI")
TRAILER = struct.Struct(">IQ")
MAX_PACKET_BYTES = 32 * 1024
"""Container runtimes copy standard input in pieces of this size, each in one write."""
MAX_PAYLOAD_BYTES = MAX_PACKET_BYTES - HEADER.size - TRAILER.size


class Packet(NamedTuple):
    """One packet."""

    kind: int
    connection: int
    """The number of the newest connection that the sender knows, counted from 1. Its upper bits are
    the generation of the link: how many hosts have adopted it. A packet of another generation than
    the agent's has no effect, unless it is an ADOPT packet of a later generation."""
    offset: int
    """The number of bytes that the sender has sent before the payload."""
    received: int
    """The number of bytes that the sender has received."""
    clock_ms: int
    """The time on the agent's clock. The host sends back the newest value that it has received, so
    the agent knows when it sent the last packet that the host has received."""
    payload: bytes = b""


def packet_bytes(token: bytes, packet: Packet) -> bytes:
    """Return the bytes of a packet."""
    *numbers, payload = packet
    header = HEADER.pack(token, *numbers, len(payload))
    return header + payload + _trailer(token, packet.connection, packet.offset)


def _trailer(token: bytes, connection: int, offset: int) -> bytes:
    masks = TRAILER.unpack_from(token)
    return TRAILER.pack(connection ^ masks[0], offset ^ masks[1])


def first_connection(generation: int) -> int:
    """Return the number of the first connection in a generation of the link."""
    return (generation << GENERATION_SHIFT) + 1


def generation_of(connection: int) -> int:
    """Return the generation that is part of a connection's number."""
    return connection >> GENERATION_SHIFT


class PacketDecoder:
    """Splits the agent's bytes into packets. With `may_begin_inside`, they may begin in the middle
    of a packet, the rest of which is skipped."""

    def __init__(self, token: bytes, *, may_begin_inside: bool) -> None:
        self._token = token
        self._buffer = bytearray()
        self._has_begun = not may_begin_inside

    def feed(self, data: bytes | memoryview) -> Iterator[Packet]:
        """Yield the packets that `data` completes. Raises ProtocolError for bytes that belong to no
        packet."""
        self._buffer += data
        if not self._has_begun:
            self._skip_to_token()
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                token, kind, connection, offset, received, clock_ms, length = HEADER.unpack_from(
                    self._buffer, start
                )
                if token != self._token or length > MAX_PAYLOAD_BYTES or connection == 0:
                    raise ProtocolError(f"no packet: {self._buffer[start : start + 80]!r}")
                payload_at = start + HEADER.size
                trailer_at = payload_at + length
                if len(self._buffer) < trailer_at + TRAILER.size:
                    break
                payload = bytes(self._buffer[payload_at:trailer_at])
                start = trailer_at + TRAILER.size
                if self._buffer[trailer_at:start] != _trailer(token, connection, offset):
                    raise ProtocolError("a packet with a wrong trailer")
                yield Packet(kind, connection, offset, received, clock_ms, payload)
        finally:
            del self._buffer[:start]

    def _skip_to_token(self) -> None:
        at = self._buffer.find(self._token)
        self._has_begun = at >= 0
        kept_from = at if self._has_begun else max(0, len(self._buffer) - TOKEN_BYTES + 1)
        del self._buffer[:kept_from]
