"""What the names of the real registries stand for here."""

import ipaddress
import socket
from collections.abc import Iterable

import pytest


def addresses_of(hosts: Iterable[str]) -> tuple[str, ...]:
    """The networks of their addresses that are not public, as behind some gateways. A machine that
    does not reach them skips the test."""
    networks = set()
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
        except OSError as error:
            pytest.skip(f"this machine does not reach {host}: {error}")
        for *_, address in found:
            ip = ipaddress.ip_address(address[0])
            networks |= set() if ip.is_global else {f"{ip}/{ip.max_prefixlen}"}
    return tuple(sorted(networks))
