"""Host names and IP addresses in canonical form, so that rules can compare them, and the check
whether an address is public."""

import ipaddress
import re
import unicodedata
from dataclasses import dataclass

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
_MAX_CHARS = 253


@dataclass(frozen=True, slots=True)
class Target:
    """The host and port of a connection's destination."""

    host: str
    """In lower case and ASCII, without a trailing dot or the brackets of an IPv6 address."""
    port: int

    @property
    def address(self) -> IPAddress | None:
        """The host as an IP address, or None if the host is a name."""
        return parse_address(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(host: str) -> IPAddress | None:
    """Return a host in canonical form as an IP address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def parse_host(text: str) -> str:
    """Return a host name or an IP address in canonical form. Raises ValueError.

    Ambiguous forms of an address, which some programs read as a name, are invalid: decimal, octal,
    hexadecimal and shortened numbers, and IPv6 with a zone.
    """
    if not 0 < len(text) <= _MAX_CHARS + 1:
        raise ValueError("a host name has 1 to 253 characters")
    if ":" in text:
        return _canonical_ipv6(text[1:-1] if text[0] == "[" and text[-1] == "]" else text)
    name = _ascii_host(text).removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!a} is not a host name")
    if _NUMBER.fullmatch(labels[-1]) and parse_address(name) is None:
        raise ValueError(f"{text!a} is not an address: write four decimal numbers with dots")
    return name


def parse_authority(text: str, default_port: int | None = None) -> Target:
    """Parse `host:port`, or `host` if there is a default port. Raises ValueError."""
    if "@" in text:
        raise ValueError("an address must not contain a user name or a password")
    match = _AUTHORITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text[:_MAX_CHARS]!a} is not host:port")
    port = int(match[2]) if match[2] else default_port
    if port is None or not 0 < port < 65536:
        raise ValueError(f"{text[:_MAX_CHARS]!a} has no port from 1 to 65535")
    return Target(parse_host(match[1]), port)


def _canonical_ipv6(text: str) -> str:
    found = None if "%" in text else parse_address(text)
    if found is None:
        raise ValueError(f"{text!a} is not an IPv6 address, or has a zone such as %eth0")
    return str(found)


def _ascii_host(text: str) -> str:
    if text.isascii():
        return text.lower()
    normal = unicodedata.normalize("NFKC", text).lower()
    try:
        name = normal.encode("idna")
        if name.decode("idna") == normal:
            return name.decode("ascii")
    except UnicodeError:
        pass
    # For example \u00df, which is "ss" in IDNA 2003 and a letter of its own in IDNA 2008.
    raise ValueError(f"{text!a} is ambiguous: write its xn-- form")


# Public addresses

# From IANA's special-purpose registries, and the host agent of a cloud. `ipaddress.is_global` is
# not used, because its result differs between versions of Python.
_NOT_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network, unspecified
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata at 100.100.100.200
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's host agent
        "169.254.0.0/16",  # link-local; metadata at 169.254.169.254
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; metadata at 192.0.0.192
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
# Outside this network are the loopback, unspecified, mapped and compatible IPv4, NAT64, ULA,
# link-local and multicast addresses.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)


def is_public(address: IPAddress) -> bool:
    """Return True if the address belongs to the public internet and embeds no IPv4 address.

    A sandbox reaches an address that is not public only if its rules allow the network of the
    address.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def parse_network(text: str) -> Network:
    """Parse a network such as 10.1.0.0/16. Raises ValueError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network such as 10.1.0.0/16: {error}") from error
