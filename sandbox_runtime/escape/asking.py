"""What programs say to a proxy."""

import ssl
from contextlib import suppress


def connect(authority: str) -> bytes:
    """CONNECT, for a tunnel."""
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("latin-1")


def get(url: str, host: str, *lines: str, body: bytes = b"") -> bytes:
    """A plain request with these headers more."""
    head = "\r\n".join((f"GET {url} HTTP/1.1", f"Host: {host}", *lines))
    return f"{head}\r\n\r\n".encode("latin-1") + body


def socks(host: str, port: int, *, command: int = 1) -> bytes:
    """SOCKS 5 with its greeting; 1 is CONNECT. The host is given as a name, whatever it is."""
    name = host.encode()
    ask = bytes([5, command, 0, 3, len(name)]) + name + port.to_bytes(2, "big")
    return b"\x05\x01\x00" + ask


def client_hello(server_name: str | None) -> bytes:
    """What TLS says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()
