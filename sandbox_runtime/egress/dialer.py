"""From a target to a connection: resolved once, and only to an address that was checked."""

import asyncio
import errno
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache

from policies.egress import Rules
from policies.hosts import IPAddress, Target, address, is_public
from sandbox_runtime.egress.errors import DeniedError, UnreachableError
from sandbox_runtime.egress.resolver import Resolve

BUFFER_BYTES = 64 << 10
_LOOKUPS = 4
"""Of one sandbox at a time, so that its slow names do not hold up another's."""
_MAX_ADDRESSES = 4
Server = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[Server]]
"""Open a connection to an address and a port. Raises OSError."""
Endpoint = tuple[str, int | None]
"""An address and a port; None is every port."""
_parsed = lru_cache(ipaddress.ip_address)
"""Every sandbox has a dialer, and all of them the same forbidden addresses."""


async def open_connection(ip: str, port: int) -> Server:
    """Connect from this host, but not to a public address of its own. Raises OSError."""
    reader, writer = await asyncio.open_connection(ip, port, limit=BUFFER_BYTES)
    here, there = (writer.get_extra_info(end)[0] for end in ("sockname", "peername"))
    if here == there and is_public(ipaddress.ip_address(ip)):
        writer.transport.abort()
        raise PermissionError(errno.EACCES, "it is the proxy's own host")
    return reader, writer


class Dialer:
    """Connects for one sandbox."""

    def __init__(
        self,
        rules: Rules,
        forbidden: Collection[Endpoint],
        resolve: Resolve,
        connect: Connect,
        timeout_s: float,
    ) -> None:
        self._rules = rules
        self._forbidden = frozenset((_parsed(ip), port) for ip, port in forbidden)
        self._resolve = resolve
        self._connect = connect
        self._timeout_s = timeout_s
        self._lookups = asyncio.Semaphore(_LOOKUPS)

    async def dial(self, target: Target) -> Server:
        """Connect to the first address that answers. Raises DeniedError, UnreachableError."""
        failure = f"cannot connect to {target}: no answer in {self._timeout_s:g} s"
        status = 504
        for ip in await self._addresses(target):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._connect(str(ip), target.port)
            except TimeoutError:
                continue
            except OSError as error:
                failure, status = f"cannot connect to {target}: {error.strerror or error}", 502
        raise UnreachableError(failure, status)

    async def check(self, target: Target) -> None:
        """Raises DeniedError, UnreachableError for a target without an address that may be
        dialed."""
        await self._addresses(target)

    async def _addresses(self, target: Target) -> list[IPAddress]:
        """Those of the target's addresses that may be dialed; at least one."""
        found = [target.address] if target.address else await self._look_up(target.host)
        allowed = [
            ip
            for ip in found
            if self._rules.reachable(ip)
            and self._forbidden.isdisjoint({(ip, target.port), (ip, None)})
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
        addresses = [ip for text in dict.fromkeys(found) if (ip := address(text))]
        if not addresses:
            raise UnreachableError(f"cannot resolve {host}: it has no address")
        return addresses
