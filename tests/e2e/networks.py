"""Address ranges of the real registries as this host resolves them."""

import ipaddress
import socket
from collections.abc import Iterable

import pytest


def addresses_of(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return the networks of the hosts' non-public addresses, as some gateways assign them.

    Skip the test if this machine cannot resolve a host.
    """
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
