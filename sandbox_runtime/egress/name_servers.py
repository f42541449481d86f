"""Asks a host's name servers for the addresses of a name.

Imported with the first name that is looked up: dnspython is slow to import, and a sandbox without a
network needs none.
"""

import socket
from pathlib import Path

import anyio
from dns.asyncbackend import get_backend
from dns.asyncresolver import Resolver
from dns.exception import DNSException, Timeout
from dns.resolver import NXDOMAIN, NoNameservers

LIFETIME_S = 10.0
"""How long name servers are asked for one name; mostly its asker has less time."""
OTHER_FAMILY_S = 1.0
"""How long a name whose addresses of one family are known waits for those of the other."""
MAX_ADDRESSES = 16
"""Of one family: what else a name server says of a name is not looked at."""


class NameServers:
    """The name servers and search domains of a resolv.conf, as they are when this is made."""

    def __init__(self, resolv_conf: Path, port: int) -> None:
        self._resolver = resolver = Resolver(configure=False)
        try:
            resolver.read_resolv_conf(str(resolv_conf))
        except (DNSException, ValueError):
            resolver.nameservers = ["127.0.0.1"]  # as resolv.conf(5) has it
        resolver.port, resolver.lifetime = port, LIFETIME_S
        resolver.use_search_by_default = True

    async def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, of both families. Raises gaierror."""
        found: list[str] = []
        failures: list[DNSException] = []
        async with anyio.create_task_group() as group:

            async def ask(kind: str) -> None:
                try:
                    answer = await self._resolver.resolve(
                        host, kind, backend=get_backend("asyncio")
                    )
                except DNSException as failure:
                    failures.append(failure)
                    if not isinstance(failure, NXDOMAIN):
                        return
                else:
                    found.extend(str(record) for record in list(answer)[:MAX_ADDRESSES])
                # After NXDOMAIN too, which some say of the family that they do not know (RFC 4074).
                group.cancel_scope.deadline = anyio.current_time() + OTHER_FAMILY_S

            group.start_soon(ask, "A")
            group.start_soon(ask, "AAAA")
        if not found:
            raise _error(failures)
        return found


def _error(failures: list[DNSException]) -> socket.gaierror:
    """What getaddrinfo says of the same."""
    is_late = any(isinstance(each, Timeout | NoNameservers) for each in failures)
    if is_late and not any(isinstance(each, NXDOMAIN) for each in failures):
        return socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return socket.gaierror(socket.EAI_NONAME, "Name or service not known")
