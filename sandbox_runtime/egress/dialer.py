"""Name resolution and connecting: a Dialer resolves a target once and connects only to an address
that it has checked; SystemResolver resolves names as this host does.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import anyio

from policies.egress import EgressRules
from policies.hosts import IPAddress, Target, is_public, parse_address
from sandbox_runtime.egress.decision import DeniedError, UnreachableError

BUFFER_BYTES = 64 << 10
_MAX_LOOKUPS = 4
"""Maximum number of concurrent lookups of one sandbox, so that its slow names do not delay the
lookups of other sandboxes."""
_MAX_ADDRESSES = 4
"""Maximum number of addresses of one name that are dialed."""
_LOOKUP_TIMEOUT_S = 10.0
"""The timeout of one lookup; the caller's timeout is usually shorter."""
_OTHER_FAMILY_S = 1.0
"""Maximum time that a lookup waits for the second family of addresses (IPv4 or IPv6), after the
answer for the first."""
_MAX_RECORDS = 16
"""Maximum number of records that are read from one DNS response."""
HOSTS, RESOLV_CONF = Path("/etc/hosts"), Path("/etc/resolv.conf")
DNS_PORT = 53
_LOOPBACK = ("127.0.0.1", "::1")
Server = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[Server]]
"""A function that opens a connection to an address and a port. Raises OSError."""
Endpoint = tuple[str, int | None]
"""An address and a port; None stands for all ports."""
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""A function that returns the addresses of a name, best first. Raises OSError."""
_Stamp = tuple[int, int, int] | None
"""A file's inode, size and modification time; None if it is missing."""
_parse_ip = lru_cache(ipaddress.ip_address)
"""Parses an address. The results are cached, because the dialers of all sandboxes parse the same
forbidden addresses."""


async def open_connection(ip: str, port: int) -> Server:
    """Connect from this host; refuse this host's own public addresses. Raises OSError."""
    reader, writer = await asyncio.open_connection(ip, port, limit=BUFFER_BYTES)
    local, remote = (writer.get_extra_info(end)[0] for end in ("sockname", "peername"))
    if local == remote and is_public(ipaddress.ip_address(ip)):
        writer.transport.abort()
        raise PermissionError(errno.EACCES, "the address is the proxy's own")
    return reader, writer


class Dialer:
    """Resolves names and opens connections for one sandbox, only to addresses that its rules
    allow."""

    def __init__(
        self,
        rules: EgressRules,
        forbidden: Collection[Endpoint],
        resolve: Resolve,
        connect: Connect,
        timeout_s: float,
    ) -> None:
        self._rules = rules
        self._forbidden = frozenset((_parse_ip(ip), port) for ip, port in forbidden)
        self._own_ports = {port for ip, port in self._forbidden if ip.is_unspecified}
        """The ports that are forbidden on every address of this host."""
        self._resolve = resolve
        self._connect = connect
        self._timeout_s = timeout_s
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)

    async def dial(self, target: Target) -> Server:
        """Connect to the first address that answers. Raises DeniedError if the target has no
        address that may be dialed, and UnreachableError if it cannot be resolved or no address
        answers."""
        failure = f"cannot connect to {target}: no answer in {self._timeout_s:g} s"
        status = 504
        for ip in await self._dialable_addresses(target):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._connect(str(ip), target.port)
            except TimeoutError:
                continue
            except OSError as error:
                failure, status = f"cannot connect to {target}: {error.strerror or error}", 502
        raise UnreachableError(failure, status)

    async def check(self, target: Target) -> None:
        """Raise DeniedError or UnreachableError if the target has no address that may be dialed."""
        await self._dialable_addresses(target)

    async def _dialable_addresses(self, target: Target) -> list[IPAddress]:
        """Return the addresses of the target that may be dialed, at least one."""
        found = [target.address] if target.address else await self._look_up(target.host)
        allowed = [
            ip
            for ip in found
            if self._rules.is_reachable(ip)
            and self._forbidden.isdisjoint({(ip, target.port), (ip, None)})
            and not (target.port in self._own_ports and _is_own_address(ip))
        ]
        if not allowed:
            raise DeniedError(
                f"host {target.host} has no address that a sandbox may reach"
                " (it is private, reserved or the proxy's own)"
            )
        return allowed[:_MAX_ADDRESSES]

    async def _look_up(self, host: str) -> list[IPAddress]:
        try:
            async with asyncio.timeout(self._timeout_s), self._lookups:
                found = await self._resolve(host)
        except TimeoutError as error:
            raise UnreachableError(f"cannot resolve {host}: no answer", 504) from error
        except OSError as error:
            raise UnreachableError(f"cannot resolve {host}: {error.strerror or error}") from error
        addresses = [ip for text in dict.fromkeys(found) if (ip := parse_address(text))]
        if not addresses:
            raise UnreachableError(f"cannot resolve {host}: it has no address")
        return addresses


def _is_own_address(ip: IPAddress) -> bool:
    """Return True if the address belongs to this host: a socket can be bound to it."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _ResolverFiles:
    """The contents of `/etc/hosts` and `/etc/resolv.conf`."""

    stamps: tuple[_Stamp, _Stamp]
    hosts: Mapping[str, Sequence[str]]
    servers: "_NameServers"


class SystemResolver:
    """Resolves names by this host's hosts file and name servers; reads its files again when they
    change.

    Unlike getaddrinfo, a lookup uses no thread, only its own sockets, and a cancellation closes
    them: a name whose servers do not answer delays no other lookup. The order is `/etc/hosts`,
    `localhost`, the name servers of `/etc/resolv.conf` with its search domains. Other sources of
    `nsswitch.conf` (mDNS, LDAP, NIS) are not used.
    """

    def __init__(
        self, hosts: Path = HOSTS, resolv_conf: Path = RESOLV_CONF, port: int = DNS_PORT
    ) -> None:
        self._hosts = hosts
        self._resolv_conf = resolv_conf
        self._port = port
        self._resolver_files: _ResolverFiles | None = None

    async def __call__(self, host: str) -> Sequence[str]:
        if parse_address(host):
            return [host]
        config = await self._current_files()
        name = host.lower().removesuffix(".")
        if found := config.hosts.get(name):
            return found
        if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, section 6.3
            return _LOOPBACK
        return sorted(await config.servers.addresses(host), key=_address_rank)

    async def _current_files(self) -> _ResolverFiles:
        stamps = (_file_stamp(self._hosts), _file_stamp(self._resolv_conf))
        if self._resolver_files is None or self._resolver_files.stamps != stamps:
            self._resolver_files = await asyncio.to_thread(self._read, stamps)
        return self._resolver_files

    def _read(self, stamps: tuple[_Stamp, _Stamp]) -> _ResolverFiles:
        return _ResolverFiles(
            stamps, _read_hosts(self._hosts), _NameServers(self._resolv_conf, self._port)
        )


def _address_rank(ip: str) -> int:
    """Return an address's sort key, simplified from RFC 6724: 0 for IPv6 that this host reaches
    from a global address, 1 for IPv4, 2 for other IPv6, 3 for an address without a route."""
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
    """Return the addresses of each name in a hosts file, in the order of the file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    hosts: dict[str, list[str]] = {}
    for line in text.splitlines():
        ip, *names = line.partition("#")[0].split() or [""]
        if parse_address(ip):
            for name in names:
                hosts.setdefault(name.lower().removesuffix("."), []).append(ip)
    return hosts


def _file_stamp(path: Path) -> _Stamp:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class _NameServers:
    """The name servers and search domains of a resolv.conf.

    dnspython is imported in the constructor, because the import is slow and a sandbox without
    network does not need it. The thread that makes the first instance runs the import.
    """

    def __init__(self, resolv_conf: Path, port: int) -> None:
        from dns.asyncresolver import Resolver  # noqa: PLC0415 - see the class
        from dns.exception import DNSException  # noqa: PLC0415 - see the class

        self._resolver = resolver = Resolver(configure=False)
        try:
            resolver.read_resolv_conf(str(resolv_conf))
        except (DNSException, ValueError):
            resolver.nameservers = ["127.0.0.1"]  # the default of resolv.conf(5)
        resolver.port, resolver.lifetime = port, _LOOKUP_TIMEOUT_S
        resolver.use_search_by_default = True

    async def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, of both families. Raises gaierror."""
        from dns.asyncbackend import get_backend  # noqa: PLC0415 - see the class
        from dns.exception import DNSException, Timeout  # noqa: PLC0415 - see the class
        from dns.resolver import NXDOMAIN, NoNameservers  # noqa: PLC0415 - see the class

        found: list[str] = []
        failures: list[DNSException] = []
        async with anyio.create_task_group() as group:

            async def query(kind: str) -> None:
                try:
                    answer = await self._resolver.resolve(
                        host, kind, backend=get_backend("asyncio")
                    )
                except DNSException as failure:
                    failures.append(failure)
                    if not isinstance(failure, NXDOMAIN):
                        return
                else:
                    found.extend(str(record) for record in list(answer)[:_MAX_RECORDS])
                # After NXDOMAIN too: some servers give it for an unknown family (RFC 4074).
                group.cancel_scope.deadline = anyio.current_time() + _OTHER_FAMILY_S

            group.start_soon(query, "A")
            group.start_soon(query, "AAAA")
        if found:
            return found
        is_late = any(isinstance(failure, Timeout | NoNameservers) for failure in failures)
        if is_late and not any(isinstance(failure, NXDOMAIN) for failure in failures):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
