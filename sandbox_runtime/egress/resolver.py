"""Names to addresses, by this host's hosts file and name servers.

A lookup holds no thread, only sockets of its own, and cancelling it closes them: names whose
servers are silent hold nobody else up. Of the host's resolver it has `/etc/hosts`, `localhost` and
`/etc/resolv.conf` with its search domains, in this order; other sources of `nsswitch.conf` (mDNS,
LDAP, NIS) it does not ask.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from policies.hosts import address

if TYPE_CHECKING:
    from sandbox_runtime.egress.name_servers import NameServers

HOSTS, RESOLV_CONF = Path("/etc/hosts"), Path("/etc/resolv.conf")
DNS_PORT = 53
LOOPBACK = ("127.0.0.1", "::1")

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a name, best first. Raises OSError."""
Stamp = tuple[int, int, int] | None
"""What changes with a file: its number, size and time; None: it is missing."""


@dataclass(frozen=True, slots=True)
class _Config:
    """The host's two files, as they were read."""

    stamps: tuple[Stamp, Stamp]
    hosts: Mapping[str, Sequence[str]]
    servers: "NameServers"


class SystemResolver:
    """A Resolve that asks as this host does, and reads the host's files again when they change."""

    def __init__(
        self, hosts: Path = HOSTS, resolv_conf: Path = RESOLV_CONF, port: int = DNS_PORT
    ) -> None:
        self._hosts = hosts
        self._resolv_conf = resolv_conf
        self._port = port
        self._config: _Config | None = None

    async def __call__(self, host: str) -> Sequence[str]:
        if address(host):
            return [host]
        config = await self._current()
        name = host.lower().removesuffix(".")
        if found := config.hosts.get(name):
            return found
        if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, section 6.3
            return LOOPBACK
        return sorted(await config.servers.addresses(host), key=_rank)

    async def _current(self) -> _Config:
        stamps = (_stamp(self._hosts), _stamp(self._resolv_conf))
        if self._config is None or self._config.stamps != stamps:
            self._config = await asyncio.to_thread(self._read, stamps)
        return self._config

    def _read(self, stamps: tuple[Stamp, Stamp]) -> _Config:
        from sandbox_runtime.egress.name_servers import (  # noqa: PLC0415 - slow to import
            NameServers,
        )

        servers = NameServers(self._resolv_conf, self._port)
        return _Config(stamps, _read_hosts(self._hosts), servers)


def _rank(ip: str) -> int:
    """Which of a name's addresses to try first: as RFC 6724 has it, in short. One that this host
    has no route to comes last, and IPv6 comes first where this host has a global address."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, DNS_PORT))  # nothing is sent
            source = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return 3
    if family == socket.AF_INET:
        return 1
    return 0 if source.is_global else 2


def _read_hosts(path: Path) -> dict[str, list[str]]:
    """The addresses of each name in a hosts file, in its order."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    hosts: dict[str, list[str]] = {}
    for line in text.splitlines():
        ip, *names = line.partition("#")[0].split() or [""]
        if address(ip):
            for name in names:
                hosts.setdefault(name.lower().removesuffix("."), []).append(ip)
    return hosts


def _stamp(path: Path) -> Stamp:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
