"""The two protocols in which a program asks a proxy for a connection: HTTP and SOCKS 5.

For each protocol, one function reads a ProxyRequest and one encodes an error.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from policies.hosts import Target, parse_host
from sandbox_runtime.egress.connection import BufferedReader, Connection
from sandbox_runtime.egress.decision import DeniedError, EgressError
from sandbox_runtime.egress.http1 import MAX_HEAD_BYTES, RequestHead, parse_request_head

_HTTP_SUCCESS_REPLY = b"HTTP/1.1 200 Connection established\r\n\r\n"
_PHRASE_CHARS = 300
SOCKS_VERSION = 0x05
_NO_AUTHENTICATION = 0x00
_CONNECT_COMMAND = 0x01
_IPV4, _DOMAIN_NAME, _IPV6 = 0x01, 0x03, 0x04
_SOCKS_SUCCESS = 0x00
_GENERAL_FAILURE = 0x01
_SOCKS_CODES = {403: 0x02, 405: 0x07, 502: 0x04, 503: 0x02, 504: 0x06}


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A program's request to reach a host."""

    target: Target
    success_reply: bytes = b""
    """The reply to the program once the connection to the host is made."""
    head: RequestHead | None = None
    """The head of a plain HTTP request; None for a tunnel."""


ErrorReply = Callable[[EgressError], bytes]
"""A function that encodes an error in the protocol of the request."""


async def read_http(reader: BufferedReader) -> ProxyRequest:
    """Read CONNECT host:port, or a request with an absolute http:// URL. Raises DeniedError."""
    head = parse_request_head(await reader.read_head(MAX_HEAD_BYTES))
    if head.method == "CONNECT":
        return ProxyRequest(head.tunnel_target(), success_reply=_HTTP_SUCCESS_REPLY)
    target = head.target()
    head.check_host(target)
    return ProxyRequest(target, head=head)


def http_error(error: EgressError) -> bytes:
    """Return the response for an error; most clients show only its status line."""
    text = str(error).encode("ascii", "backslashreplace").decode()
    phrase = f"{HTTPStatus(error.status).phrase}: {text}"[:_PHRASE_CHARS]
    body = f"{text}\n"
    return (
        f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


async def read_socks(reader: BufferedReader, connection: Connection) -> ProxyRequest:
    """Greet a SOCKS 5 client (RFC 1928: no authentication, CONNECT only) and read its request.

    Raises DeniedError.
    """
    _, count = await reader.read_exactly(2)
    if _NO_AUTHENTICATION not in await reader.read_exactly(count):
        await connection.send(b"\x05\xff")
        raise DeniedError("SOCKS: only the method without authentication is offered", 400)
    await connection.send(bytes((SOCKS_VERSION, _NO_AUTHENTICATION)))
    version, command, _, kind = await reader.read_exactly(4)
    if version != SOCKS_VERSION:
        raise DeniedError("SOCKS: malformed request", 400)
    host = await _read_socks_host(reader, kind)
    port = int.from_bytes(await reader.read_exactly(2), "big")
    if command != _CONNECT_COMMAND or not port:
        raise DeniedError("SOCKS: only CONNECT to a port from 1 to 65535 is offered", 405)
    return ProxyRequest(Target(host, port), success_reply=_socks_reply(_SOCKS_SUCCESS))


def socks_error(error: EgressError) -> bytes:
    """Return the SOCKS reply for an error."""
    return _socks_reply(_SOCKS_CODES.get(error.status, _GENERAL_FAILURE))


async def _read_socks_host(reader: BufferedReader, address_type: int) -> str:
    if address_type == _IPV4:
        return str(ipaddress.IPv4Address(await reader.read_exactly(4)))
    if address_type == _IPV6:
        return str(ipaddress.IPv6Address(await reader.read_exactly(16)))
    if address_type != _DOMAIN_NAME:
        raise DeniedError("SOCKS: unknown kind of address", 400)
    name = await reader.read_exactly((await reader.read_exactly(1))[0])
    try:
        return parse_host(name.decode())
    except ValueError as error:
        raise DeniedError(str(error)) from error


def _socks_reply(code: int) -> bytes:
    return bytes((SOCKS_VERSION, code, 0, _IPV4)) + bytes(6)
