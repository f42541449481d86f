"""Tunnels, and the check of a TLS ClientHello before any byte of it is sent to the server.

The rest of a TLS stream is encrypted: a Host header inside may still name another site of the same
server (domain fronting).
"""

from collections.abc import Iterator

from policies.egress import TLS_PORT
from policies.hosts import Target, parse_host
from sandbox_runtime.egress.connection import BufferedReader
from sandbox_runtime.egress.decision import DeniedError, HelloError
from sandbox_runtime.egress.limits import Timeouts
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay

_HANDSHAKE = 0x16
_MAX_HELLO_BYTES = 32 << 10
_MAX_RECORD_BYTES = 16 << 10
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_ENCRYPTED_HELLO = frozenset({0xFE0D, 0xFFCE})  # ECH, and the ESNI that it was before
ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
"""The fatal alert that reports a HelloError to a TLS client."""
_UNNAMED_ERROR = "TLS without a server name is refused, because its destination cannot be checked"
_ENCRYPTED_ERROR = (
    "TLS with an encrypted ClientHello is refused, because its destination cannot be checked"
)


async def tunnel(relay: Relay, target: Target, timeouts: Timeouts) -> None:
    """Relay both directions to their end. Raises ConnectionError, EgressError.

    Only TLS is allowed to port 443. For other ports, a ClientHello is checked if the program's data
    begins with one.
    """

    async def relay_to_server() -> None:
        if target.port == TLS_PORT or await relay.program_reader.peek() == _HANDSHAKE:
            await relay.send_to_server(
                await timeouts.wait_for_head(read_client_hello(relay.program_reader, target))
            )
        while data := await relay.program_reader.read(PIECE_BYTES):
            await relay.send_to_server(data)
        relay.send_end_to_server()

    await relay.run(relay_to_server, relay.relay_rest_to_program)


async def read_client_hello(reader: BufferedReader, target: Target) -> bytes:
    """Return the records of a ClientHello for `target`. Raises DeniedError."""
    if await reader.peek() != _HANDSHAKE:
        raise DeniedError(f"only TLS passes to port {target.port}")
    records, message = b"", b""
    while len(message) < 4 or len(message) < _message_end(message):
        header = await reader.read_exactly(5)
        length = int.from_bytes(header[3:], "big")
        if header[0] != _HANDSHAKE or header[1] != 3 or not 0 < length <= _MAX_RECORD_BYTES:
            raise _malformed_error()
        fragment = await reader.read_exactly(length)
        records += header + fragment
        message += fragment
        if message[0] != _CLIENT_HELLO or len(records) > _MAX_HELLO_BYTES:
            raise _malformed_error()
    if len(message) > _message_end(message):
        raise _malformed_error()
    _check_name(server_name(message[4:]), target)
    return records


def server_name(hello: bytes) -> str | None:
    """Return the server name in the body of a ClientHello, or None. Raises HelloError if the
    ClientHello is malformed or encrypted."""
    fields = _Fields(hello)
    fields.take(2 + 32)  # version, random
    for length_bytes in (1, 2, 1):  # session, cipher suites, compression methods
        fields.vector(length_bytes)
    extensions = dict[int, bytes]()
    for kind, content in _extensions(fields):
        if kind in extensions:
            raise _malformed_error()
        extensions[kind] = content
    if _ENCRYPTED_HELLO & extensions.keys():
        raise HelloError(_ENCRYPTED_ERROR)
    if _SERVER_NAME not in extensions:
        return None
    names = _Fields(_Fields(extensions[_SERVER_NAME]).only_vector(2))
    if names.take(1)[0] != _HOST_NAME:
        raise _malformed_error()
    try:
        return names.only_vector(2).decode("ascii")
    except UnicodeDecodeError as error:
        raise _malformed_error() from error


def _check_name(name: str | None, target: Target) -> None:
    if name is None:
        if target.address is None:
            raise HelloError(_UNNAMED_ERROR)
        return  # an address has no name that TLS could carry
    try:
        host = parse_host(name)
    except ValueError as error:
        raise HelloError(str(error)) from error
    if host != target.host:
        raise HelloError(f"TLS names the server {host} in a connection to {target.host}")


def _message_end(message: bytes) -> int:
    return 4 + int.from_bytes(message[1:4], "big")


def _extensions(fields: "_Fields") -> Iterator[tuple[int, bytes]]:
    if fields.remaining:
        extensions = _Fields(fields.only_vector(2))
        while extensions.remaining:
            yield int.from_bytes(extensions.take(2), "big"), extensions.vector(2)


class _Fields:
    """Reads the fields of a TLS structure in order. Raises HelloError if a field is too short."""

    def __init__(self, data: bytes) -> None:
        self.remaining = data

    def take(self, count: int) -> bytes:
        if len(self.remaining) < count:
            raise _malformed_error()
        taken, self.remaining = self.remaining[:count], self.remaining[count:]
        return taken

    def vector(self, length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(length_bytes), "big"))

    def only_vector(self, length_bytes: int) -> bytes:
        content = self.vector(length_bytes)
        if self.remaining:
            raise _malformed_error()
        return content


def _malformed_error() -> HelloError:
    return HelloError("malformed TLS ClientHello", 400)
