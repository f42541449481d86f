"""TLS's first message: the server a program wants, before a byte of it goes anywhere.

What follows is hidden: a Host header inside may still name another site of the same server.
"""

from collections.abc import Iterator

from policies.hosts import Target, parse_host
from sandbox_runtime.egress.connection import Inbox
from sandbox_runtime.egress.errors import DeniedError, HelloError

FIRST_BYTE = 0x16
MAX_HELLO_BYTES = 32 << 10
_MAX_RECORD_BYTES = 16 << 10
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_ENCRYPTED_HELLO = frozenset({0xFE0D, 0xFFCE})  # ECH, and the ESNI that it was before
ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
"""A fatal alert: what a HelloError is to a TLS client."""
_UNNAMED = "TLS without a server name is refused, as nothing shows where it leads"
_ENCRYPTED = "TLS with an encrypted ClientHello is refused, as nothing shows where it leads"


async def read_hello(inbox: Inbox, target: Target) -> bytes:
    """The records of a ClientHello for `target`, however they are cut. Raises DeniedError."""
    if await inbox.peek() != FIRST_BYTE:
        raise DeniedError(f"only TLS passes to port {target.port}")
    records, message = b"", b""
    while len(message) < 4 or len(message) < _end(message):
        header = await inbox.exactly(5)
        length = int.from_bytes(header[3:], "big")
        if header[0] != FIRST_BYTE or header[1] != 3 or not 0 < length <= _MAX_RECORD_BYTES:
            raise _malformed()
        fragment = await inbox.exactly(length)
        records += header + fragment
        message += fragment
        if message[0] != _CLIENT_HELLO or len(records) > MAX_HELLO_BYTES:
            raise _malformed()
    if len(message) > _end(message):
        raise _malformed()
    _check_name(server_name(message[4:]), target)
    return records


def server_name(hello: bytes) -> str | None:
    """The name in the body of a ClientHello. Raises HelloError, also where it may be hidden."""
    fields = _Fields(hello)
    fields.take(2 + 32)  # version, random
    for length_bytes in (1, 2, 1):  # session, cipher suites, compression methods
        fields.vector(length_bytes)
    extensions = dict[int, bytes]()
    for kind, content in _extensions(fields):
        if kind in extensions:
            raise _malformed()
        extensions[kind] = content
    if _ENCRYPTED_HELLO & extensions.keys():
        raise HelloError(_ENCRYPTED)
    if _SERVER_NAME not in extensions:
        return None
    names = _Fields(_Fields(extensions[_SERVER_NAME]).only_vector(2))
    if names.take(1)[0] != _HOST_NAME:
        raise _malformed()
    try:
        return names.only_vector(2).decode("ascii")
    except UnicodeDecodeError as error:
        raise _malformed() from error


def _check_name(name: str | None, target: Target) -> None:
    if name is None:
        if target.address is None:
            raise HelloError(_UNNAMED)
        return  # an address has no name that TLS could carry
    try:
        host = parse_host(name)
    except ValueError as error:
        raise HelloError(str(error)) from error
    if host != target.host:
        raise HelloError(f"TLS names the server {host} in a connection to {target.host}")


def _end(message: bytes) -> int:
    return 4 + int.from_bytes(message[1:4], "big")


def _extensions(fields: "_Fields") -> Iterator[tuple[int, bytes]]:
    if fields.left:
        extensions = _Fields(fields.only_vector(2))
        while extensions.left:
            yield int.from_bytes(extensions.take(2), "big"), extensions.vector(2)


class _Fields:
    """Reading bytes from front to back, never beyond their end."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, count: int) -> bytes:
        if len(self.left) < count:
            raise _malformed()
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def vector(self, length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(length_bytes), "big"))

    def only_vector(self, length_bytes: int) -> bytes:
        content = self.vector(length_bytes)
        if self.left:
            raise _malformed()
        return content


def _malformed() -> HelloError:
    return HelloError("malformed TLS ClientHello", 400)
