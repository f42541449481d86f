"""Attacks on the host and the proxy from a sandbox: shared namespaces, the host's files, and
sockets and addresses of the host that can be reached."""

import asyncio
import itertools
import json
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_runtime.escape.context import Attack, EscapeContext, run_python

_SEPARATE_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")
"""The namespaces that a sandbox must not share with the proxy. The user namespace is not among
them, because an engine may share it: root in the sandbox is then the host's root, without its
capabilities."""
_NAMESPACES = """
import json, os
names = os.listdir("/proc/self/ns")
print(json.dumps({name: os.readlink("/proc/self/ns/" + name) for name in names}))
"""
_CONNECT = """
import socket
with socket.socket(socket.{family}) as client:
    client.settimeout(5)
    client.connect({address!r})
    client.recv(1)
"""
_ROUTES = """
import socket
for address in {addresses!r}:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((address, 9))
            print(address)
        except OSError:
            pass
"""
"""A program that prints the addresses to which a route exists. Nothing is sent, because connecting
a datagram socket only looks up a route."""


async def _find_shared_namespaces(context: EscapeContext) -> str | None:
    result = await run_python(await context.neighbour(), _NAMESPACES)
    if result.exit_code != 0:
        return None  # the sandbox's own kernel has no namespaces
    inside = json.loads(result.stdout)
    ours = Path("/proc/self/ns")
    shared = [
        name for name in _SEPARATE_NAMESPACES if inside.get(name) == str((ours / name).readlink())
    ]
    return f"shared with the proxy: {', '.join(shared)}" if shared else None


async def _connect_to_host_loopback(context: EscapeContext) -> str | None:
    counter = _ConnectionCounter()
    server = await asyncio.start_server(counter.accept, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        await run_python(
            await context.neighbour(), _CONNECT.format(family="AF_INET", address=address)
        )
    return f"a service at {address[0]} of the host is reached" if counter.count else None


async def _connect_to_abstract_socket(context: EscapeContext) -> str | None:
    counter = _ConnectionCounter()
    address = f"\0sandbox-{secrets.token_hex(8)}"
    async with await asyncio.start_unix_server(counter.accept, address):
        await run_python(
            await context.neighbour(), _CONNECT.format(family="AF_UNIX", address=address)
        )
    return "an abstract socket of the host is reached" if counter.count else None


async def _find_route_to_host(context: EscapeContext) -> str | None:
    program = _ROUTES.format(addresses=list(_host_addresses()))
    routes = (await run_python(await context.neighbour(), program)).stdout.split()
    return f"there is a route to the host's address {routes[0]}" if routes else None


async def _find_host_file(context: EscapeContext) -> str | None:
    with tempfile.NamedTemporaryFile(prefix="sandbox-") as file:
        roots = ("", "/proc/*/root", "/proc/*/cwd/..", "/proc/*/cwd/../..", "/host", "/mnt")
        places = " ".join(f"{root}{file.name}" for root in roots)
        result = await (await context.neighbour()).exec(
            f"ls {places} 2>/dev/null", timeout_s=10, shell_state="none"
        )
    found = result.stdout.split()
    return f"a file of the host is at {found[0]}" if found else None


class _ConnectionCounter:
    """Counts the connections to a service on the host."""

    def __init__(self) -> None:
        self.count = 0

    async def accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        writer.write(b"!")
        writer.close()


def _host_addresses() -> Iterator[str]:
    """Yield the host's IPv4 addresses, except loopback ones, and its global IPv6 addresses."""
    lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    for address, kind in itertools.pairwise(lines):
        name = address.rpartition(" ")[2]
        if "host LOCAL" in kind and not name.startswith("127."):
            yield name
    with Path("/proc/net/if_inet6").open(encoding="ascii") as table:
        for line in table:
            digits, _, _, scope, _, _ = line.split()
            if scope == "00":  # global scope: the others are valid on one interface only
                yield ":".join(digits[at : at + 4] for at in range(0, 32, 4))


ATTACKS = (
    Attack(
        "proxy_namespaces",
        "host",
        "Looks for namespaces that the proxy is in too.",
        _find_shared_namespaces,
    ),
    Attack(
        "host_loopback",
        "host",
        "Connects to a service on the host's loopback.",
        _connect_to_host_loopback,
    ),
    Attack(
        "host_abstract_socket",
        "host",
        "Connects to an abstract socket of the host.",
        _connect_to_abstract_socket,
    ),
    Attack(
        "host_addresses",
        "host",
        "Looks for a route to the host's own addresses, where services on 0.0.0.0 are.",
        _find_route_to_host,
    ),
    Attack("host_files", "host", "Looks for a file that the host has just made.", _find_host_file),
)
