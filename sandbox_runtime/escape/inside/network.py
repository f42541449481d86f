"""Attempts to reach the network. Connecting a datagram socket looks up a route and sends nothing,
so no packet leaves the host, whatever the attempts find."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import summarize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EGRESS_PORT = 3128
_METADATA = ("169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254")
_PRIVATE = ("10.0.0.1", "172.17.0.1", "172.18.0.1", "192.168.0.1", "100.64.0.1", "fd00::1")
_PUBLIC = ("192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1")
"""Addresses of the documentation networks, which are routed like public ones."""
_RESOLVERS = ("127.0.0.1", "127.0.0.11", "127.0.0.53")
_QUESTION = struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + b"\x07example\x00\x00\x01\x00\x01"
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914
_LISTENING = "0A"
_TIMEOUT_S = 1.0


def interfaces() -> str | None:
    """Looks for network interfaces other than the loopback."""
    return summarize("interfaces", (name for _, name in socket.if_nameindex() if name != "lo"))


def interface_settings() -> str | None:
    """Sets the flags of the sandbox's loopback interface to their current value."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        loopback = fcntl.ioctl(anything, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(anything, _SET_FLAGS, loopback)
    return "interfaces can be set"


def metadata() -> str | None:
    """Looks for a route to a cloud's metadata service, which gives out keys."""
    return _routes(_METADATA)


def link_local() -> str | None:
    """Looks for a route to machines on the same link."""
    return _routes(["169.254.1.1", *_addresses_on_each_interface("fe80::1")])


def private_networks() -> str | None:
    """Looks for a route to private networks, including gateways of container engines."""
    return _routes(_PRIVATE)


def public_networks() -> str | None:
    """Looks for a route to the internet."""
    return _routes(_PUBLIC)


def multicast() -> str | None:
    """Looks for a route to multicast and broadcast addresses."""
    return _routes(["224.0.0.1", "255.255.255.255", *_addresses_on_each_interface("ff02::1")])


def name_servers() -> str | None:
    """Looks for a route to the configured name servers."""
    lines = Path("/etc/resolv.conf").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = [line.split() for line in lines]
    named = [line[1] for line in fields if len(line) > 1 and line[0] == "nameserver"]
    return _routes(name for name in named if not name.startswith("127."))


def local_name_servers() -> str | None:
    """Queries name servers on the loopback."""
    return summarize("answers", (server for server in _RESOLVERS if _resolves(server)))


def loopback_services() -> str | None:
    """Looks for listeners on the sandbox's loopback other than the egress port."""
    found: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for fields in map(str.split, lines):
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == _LISTENING and port != _EGRESS_PORT:
                found.append(f"port {port}")
    return summarize("there listens", found)


def abstract_sockets() -> str | None:
    """Connects to abstract unix sockets, which only a network namespace separates."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.split()[-1] for line in lines if line.split()[-1].startswith("@")]
    return summarize("connects to", (name for name in names if _connects("\0" + name[1:])))


def socket_files() -> str | None:
    """Connects to unix sockets in the directories of a host's services."""
    files = (
        path
        for top in ("/run", "/var/run", "/tmp", "/var/tmp", "/dev")
        for path in Path(top).rglob("*")
    )
    return summarize(
        "connects to", (path for path in files if _is_socket(path) and _connects(str(path)))
    )


def _routes(addresses: Iterable[str]) -> str | None:
    return summarize("a route to", (address for address in addresses if _has_route(address)))


def _addresses_on_each_interface(address: str) -> Iterator[str]:
    return (f"{address}%{name}" for _, name in socket.if_nameindex() if name != "lo")


def _has_route(address: str) -> bool:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, 80, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as datagrams:
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            datagrams.connect(where)
    except OSError:
        return False
    return True


def _resolves(server: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(_TIMEOUT_S)
        try:
            datagrams.connect((server, 53))
            datagrams.send(_QUESTION)
            return bool(datagrams.recv(512))
        except OSError:
            return False


def _connects(name: str) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(_TIMEOUT_S)
            try:
                client.connect(name)
            except OSError:
                continue
            return True
    return False


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:
        return False
