"""Host names and addresses: one spelling of each, so that rules can compare them, and which
addresses are public."""

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
    """The host and port that a connection is to go to."""

    host: str
    """In lower case and ASCII, without a trailing dot; an address without brackets."""
    port: int

    @property
    def address(self) -> IPAddress | None:
        """The host as an address, or None if it is a name."""
        return parse_address(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(host: str) -> IPAddress | None:
    """Return a host, as `parse_host` spells it, as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def parse_host(text: str) -> str:
    """Return a name or an address in the one spelling that rules compare.

    Raises ValueError, also for the spellings of an address that some programs read as one and
    others as a name: decimal, octal, hexadecimal and shortened numbers, and IPv6 with a zone.
    """
    if not 0 < len(text) <= _MAX_CHARS + 1:
        raise ValueError("a host name has 1 to 253 characters")
    if ":" in text:
        return _ipv6(text[1:-1] if text[0] == "[" and text[-1] == "]" else text)
    name = _ascii(text).removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!a} is no host name")
    if _NUMBER.fullmatch(labels[-1]) and parse_address(name) is None:
        raise ValueError(f"{text!a} is no address: write four decimal numbers with dots")
    return name


def parse_authority(text: str, default_port: int | None = None) -> Target:
    """Parse `host:port`, or `host` where there is a default port. Raises ValueError."""
    if "@" in text:
        raise ValueError("user names and passwords do not belong into an address")
    match = _AUTHORITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text[:_MAX_CHARS]!a} is not host:port")
    port = int(match[2]) if match[2] else default_port
    if port is None or not 0 < port < 65536:
        raise ValueError(f"{text[:_MAX_CHARS]!a} has no port from 1 to 65535")
    return Target(parse_host(match[1]), port)


def _ipv6(text: str) -> str:
    found = None if "%" in text else parse_address(text)
    if found is None:
        raise ValueError(f"{text!a} is no IPv6 address (zones are refused)")
    return str(found)


def _ascii(text: str) -> str:
    if text.isascii():
        return text.lower()
    normal = unicodedata.normalize("NFKC", text).lower()
    try:
        name = normal.encode("idna")
        if name.decode("idna") == normal:
            return name.decode("ascii")
    except UnicodeError:
        pass
    # Such as \u00df, which is "ss" in the old standard and a letter of its own in the new one.
    raise ValueError(f"{text!a} is not one name in every reading: write its xn-- form")


# Public addresses

# From IANA's special-purpose registries: `ipaddress.is_global` changes with Python.
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
# The rest is loopback, unspecified, mapped and compatible IPv4, NAT64, ULA, link-local, multicast.
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
    """Return True if the address belongs to the public internet and embeds no other address.

    No sandbox reaches other addresses, unless its rules name their network.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def parse_network(text: str) -> Network:
    """Parse a network such as 10.1.0.0/16. Raises ValueError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no network such as 10.1.0.0/16: {error}") from error
