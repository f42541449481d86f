"""SOCKS 5 (RFC 1928): no authentication, CONNECT only."""

import ipaddress

from policies.hosts import Target, parse_host
from sandbox_runtime.egress.ask import Ask
from sandbox_runtime.egress.connection import Connection, Inbox
from sandbox_runtime.egress.errors import DeniedError, EgressError

FIRST_BYTE = 0x05
_NO_AUTHENTICATION = 0x00
_CONNECT = 0x01
_IPV4, _NAME, _IPV6 = 0x01, 0x03, 0x04
_GRANTED = 0x00
_GENERAL_FAILURE = 0x01
_BY_STATUS = {403: 0x02, 405: 0x07, 502: 0x04, 503: 0x02, 504: 0x06}


async def read_ask(inbox: Inbox, connection: Connection) -> Ask:
    """Greet and read what is asked for. Raises DeniedError."""
    _, count = await inbox.exactly(2)
    if _NO_AUTHENTICATION not in await inbox.exactly(count):
        await connection.send(b"\x05\xff")
        raise DeniedError("SOCKS: only the method without authentication is offered", 400)
    await connection.send(bytes((FIRST_BYTE, _NO_AUTHENTICATION)))
    version, command, _, kind = await inbox.exactly(4)
    if version != FIRST_BYTE:
        raise DeniedError("SOCKS: malformed request", 400)
    host = await _read_host(inbox, kind)
    port = int.from_bytes(await inbox.exactly(2), "big")
    if command != _CONNECT or not port:
        raise DeniedError("SOCKS: only CONNECT to a port from 1 to 65535 is offered", 405)
    return Ask(Target(host, port), granted=_reply(_GRANTED))


def refusal(error: EgressError) -> bytes:
    """An error as a reply."""
    return _reply(_BY_STATUS.get(error.status, _GENERAL_FAILURE))


async def _read_host(inbox: Inbox, kind: int) -> str:
    if kind == _IPV4:
        return str(ipaddress.IPv4Address(await inbox.exactly(4)))
    if kind == _IPV6:
        return str(ipaddress.IPv6Address(await inbox.exactly(16)))
    if kind != _NAME:
        raise DeniedError("SOCKS: unknown kind of address", 400)
    name = await inbox.exactly((await inbox.exactly(1))[0])
    try:
        return parse_host(name.decode())
    except ValueError as error:
        raise DeniedError(str(error)) from error


def _reply(code: int) -> bytes:
    return bytes((FIRST_BYTE, code, 0, _IPV4)) + bytes(6)
