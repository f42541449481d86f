"""A name server on its own port, and the two resolver files of a host that uses it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from sandbox_runtime.egress.dialer import SystemResolver

SILENT = "silent.example."
"""Names below it are never answered."""
LATE_TURNS = 200
"""Delay of an answer, in loop turns, if the other address family is denied."""


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`, addresses by name; any other name does not exist, and for
    `denied_kinds` none does, which is said first."""

    def __init__(
        self,
        records: Mapping[str, Sequence[str]],
        silent_kinds: Sequence[str],
        denied_kinds: Sequence[str],
    ) -> None:
        self.queries: list[tuple[str, str]] = []
        """The received queries: a name, and A or AAAA."""
        self.transport: asyncio.DatagramTransport | None = None
        self._records = records
        self._silent_kinds = silent_kinds
        self._denied_kinds = denied_kinds

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.queries.append((name, kind))
        if name.endswith(SILENT) or kind in self._silent_kinds:
            return
        response = dns.message.make_response(query)
        addresses = self._records.get(name.removesuffix("."))
        if addresses is None or kind in self._denied_kinds:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif found := [ip for ip in addresses if (":" in ip) is (kind == "AAAA")]:
            response.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", kind, found))
        is_late = self._denied_kinds and kind not in self._denied_kinds
        self._send(response.to_wire(), addr, LATE_TURNS if is_late else 0)

    def _send(self, response: bytes, addr: tuple[str, int], turns: int) -> None:
        """Send a response after `turns` turns of the loop."""
        assert self.transport
        if turns:
            asyncio.get_running_loop().call_soon(self._send, response, addr, turns - 1)
        else:
            self.transport.sendto(response, addr)


@asynccontextmanager
async def name_server(
    directory: Path,
    records: Mapping[str, Sequence[str]],
    *,
    hosts: str = "",
    options: str = "",
    silent_kinds: Sequence[str] = (),
    denied_kinds: Sequence[str] = (),
) -> AsyncIterator[tuple[SystemResolver, NameServer]]:
    """Yield a resolver with these `hosts` and these `options` in resolv.conf, and its server."""
    (directory / "hosts").write_text(hosts)
    (directory / "resolv.conf").write_text(f"nameserver 127.0.0.1\n{options}\n")
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(records, silent_kinds, denied_kinds), local_addr=("127.0.0.1", 0)
    )
    server.transport = transport
    port = transport.get_extra_info("sockname")[1]
    try:
        yield SystemResolver(directory / "hosts", directory / "resolv.conf", port), server
    finally:
        transport.close()
