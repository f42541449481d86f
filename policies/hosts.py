"""Host names and addresses in one spelling each, so that rules can compare them."""

import ipaddress
import re
import unicodedata
from dataclasses import dataclass

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
_MAX_CHARS = 253


@dataclass(frozen=True, slots=True)
class Target:
    """Where a connection is to go."""

    host: str
    """In lower case and ASCII, without a trailing dot; an address without brackets."""
    port: int

    @property
    def address(self) -> IPAddress | None:
        """The host, where it is an address and no name."""
        return address(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(host: str) -> IPAddress | None:
    """A host in our spelling as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def parse_host(text: str) -> str:
    """A name or an address in our spelling.

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
    if _NUMBER.fullmatch(labels[-1]) and address(name) is None:
        raise ValueError(f"{text!a} is no address: write four decimal numbers with dots")
    return name


def parse_authority(text: str, default_port: int | None = None) -> Target:
    """`host:port`, or `host` where a port is the default. Raises ValueError."""
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
    found = None if "%" in text else address(text)
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
