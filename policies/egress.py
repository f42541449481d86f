"""The rules for connections out of a sandbox: the hosts that it may reach."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from policies.hosts import (
    IPAddress,
    Target,
    is_public,
    parse_address,
    parse_authority,
    parse_host,
    parse_network,
)

HTTP_PORT = 80
TLS_PORT = 443
WEB_PORTS = frozenset({HTTP_PORT, TLS_PORT})
PRESETS: dict[str, tuple[str, ...]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org", "registry.yarnpkg.com"),
    "debian": ("deb.debian.org", "security.debian.org"),
    "conda": ("repo.anaconda.com", "*.anaconda.org"),
    "huggingface": ("huggingface.co", "*.huggingface.co", "hf.co", "*.hf.co"),
    "github": ("github.com", "api.github.com", "codeload.github.com", "*.githubusercontent.com"),
}
"""Names in `Egress.allowed_hosts` that stand for several hosts."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_RESERVED_HEADERS = frozenset(
    {"connection", "content-length", "host", "te", "transfer-encoding", "upgrade"}
)
_HOST_WITH_PORT = re.compile(r"(?:\[.*\]|[^:]*):[^:\]]*")
_MAX_SHOWN_HOSTS = 8
"""Maximum number of allowed hosts in the message of a refusal."""


@dataclass(frozen=True, slots=True)
class BoundHeader:
    """A secret header that the proxy adds to plain HTTP requests to one host.

    The proxy cannot add headers to requests over TLS. The sandbox sees the secret only if the host
    sends it back.
    """

    host: str
    """`host` or `host:port`; the default port is 80."""
    name: str
    """Name of the header. It replaces a header of that name in the request."""
    env: str
    """Name of the environment variable that contains the header's value."""


@dataclass(frozen=True, slots=True)
class Egress:
    """Rules for connections out of a sandbox. Raises ValueError for an invalid rule."""

    mode: Literal["none", "allowlist", "open"] = "none"
    """none: no network. allowlist: the hosts in `allowed_hosts`. open: every public host, on every
    port. In any mode port 80 carries only HTTP and port 443 only TLS, so that the proxy sees the
    destination of the traffic."""
    allowed_hosts: tuple[str, ...] = ()
    """Allowed hosts in mode allowlist: host names (`pypi.org`), subdomains (`*.pypi.org`), IP
    addresses, all with an optional port (default: 80 and 443), and presets (pypi, npm, debian,
    conda, huggingface, github)."""
    allowed_cidrs: tuple[str, ...] = ()
    """Private networks whose addresses may be reached. In mode allowlist, `allowed_hosts` must
    contain the host as well."""
    headers: tuple[BoundHeader, ...] = ()
    """Secret headers that the proxy adds to plain HTTP requests."""
    max_connections: int = 64
    """Maximum number of open connections; further connections are refused."""
    max_mib_per_s: float = 100.0
    """Maximum bandwidth in both directions together, in MiB a second, with bursts of one second.
    Above it, traffic is slowed down."""

    def __post_init__(self) -> None:
        if self.max_connections < 1 or self.max_mib_per_s < 0.1:
            raise ValueError(
                "max_connections must be at least 1, max_mib_per_s at least 0.1 (got"
                f" {self.max_connections} and {self.max_mib_per_s:g})"
            )
        EgressRules(self)


@dataclass(frozen=True, slots=True)
class _Rule:
    host: str
    is_wildcard: bool
    """True if the rule allows the subdomains of `host`, but not `host` itself."""
    ports: frozenset[int]

    def matches(self, target: Target) -> bool:
        if target.port not in self.ports:
            return False
        if self.is_wildcard:
            return target.host.endswith("." + self.host)
        return target.host == self.host

    def covers(self, other: "_Rule") -> bool:
        """Return True if this rule matches every target that the other rule matches."""
        if self.is_wildcard:
            is_subdomain = other.host.endswith("." + self.host)
            covers_host = is_subdomain or (other.is_wildcard and other.host == self.host)
        else:
            covers_host = other.host == self.host and not other.is_wildcard
        return covers_host and other.ports <= self.ports


class EgressRules:
    """The parsed rules of an Egress. Raises ValueError for an invalid rule, for allowed hosts in a
    mode that ignores them, and for a header that cannot be added."""

    def __init__(self, egress: Egress) -> None:
        if egress.allowed_hosts and egress.mode != "allowlist":
            raise ValueError(
                f"allowed_hosts has no effect in mode {egress.mode}: set mode to allowlist"
            )
        self._mode = egress.mode
        self._hosts = tuple(expanded_hosts(egress))
        self._rules = tuple(_parse_rule(host) for host in self._hosts)
        self._networks = tuple(parse_network(cidr) for cidr in egress.allowed_cidrs)
        self._headers = tuple((self._bound_target(header), header) for header in egress.headers)

    def refusal(self, target: Target) -> str | None:
        """Return the error message for a denied target, or None if the target is allowed."""
        if self._mode == "none":
            return "this sandbox has no network"
        if self._mode == "open" or any(rule.matches(target) for rule in self._rules):
            return None
        denied = f"host {target.host}"
        if any(
            rule.matches(Target(target.host, port)) for rule in self._rules for port in rule.ports
        ):
            denied = f"port {target.port} of host {target.host}"
        return f"{denied} is not in this sandbox's allowlist (allowed: {self._allowlist_summary()})"

    def is_reachable(self, address: IPAddress) -> bool:
        """Return True if an address is public or in `allowed_cidrs`. `refusal` decides about the
        host and the port."""
        return is_public(address) or any(address in network for network in self._networks)

    def headers_for(self, target: Target) -> tuple[BoundHeader, ...]:
        """Return the headers that the proxy adds to plain HTTP requests to the target."""
        return tuple(header for bound, header in self._headers if bound == target)

    def _allowlist_summary(self) -> str:
        shown = ", ".join(self._hosts[:_MAX_SHOWN_HOSTS]) or "nothing"
        more = len(self._hosts) - _MAX_SHOWN_HOSTS
        return f"{shown} and {more} more" if more > 0 else shown

    def _bound_target(self, header: BoundHeader) -> Target:
        target = parse_authority(header.host, HTTP_PORT)
        if not _HEADER_NAME.fullmatch(header.name) or header.name.lower() in _RESERVED_HEADERS:
            raise ValueError(f"{header.name!r} is not a header that can be bound to a host")
        only_tls = any(rule.matches(Target(target.host, TLS_PORT)) for rule in self._rules)
        if target.port == TLS_PORT or (self.refusal(target) and only_tls):
            raise ValueError(
                f"header {header.name} cannot be bound to {header.host}: requests to port"
                f" {TLS_PORT} leave the sandbox encrypted, and the proxy cannot add to them"
            )
        if refusal := self.refusal(target):
            raise ValueError(f"header {header.name} is bound to {header.host}, but {refusal}")
        return target


def is_subset(requested: Egress, allowed: Egress) -> bool:
    """Return True if `allowed` permits everything that `requested` permits."""
    if requested.mode == "none":
        return True
    if allowed.mode == "none" or (requested.mode == "open" and allowed.mode != "open"):
        return False
    covered = set(_covered_hosts(requested, allowed))
    return (
        (allowed.mode == "open" or covered == set(expanded_hosts(requested)))
        and set(requested.allowed_cidrs) <= set(allowed.allowed_cidrs)
        and set(requested.headers) <= set(allowed.headers)
        and requested.max_connections <= allowed.max_connections
        and requested.max_mib_per_s <= allowed.max_mib_per_s
    )


def _covered_hosts(requested: Egress, allowed: Egress) -> list[str]:
    """Return the host rules of `requested` that `allowed` covers completely."""
    bounds = [_parse_rule(host) for host in expanded_hosts(allowed)]
    return [
        host
        for host in expanded_hosts(requested)
        if any(bound.covers(_parse_rule(host)) for bound in bounds)
    ]


def intersection(one: Egress, other: Egress) -> Egress:
    """Return rules that permit the connections that both arguments permit."""
    modes = {one.mode, other.mode}
    if "none" in modes:
        return Egress()
    if modes == {"allowlist"}:
        allow = dict.fromkeys([*_covered_hosts(one, other), *_covered_hosts(other, one)])
    else:
        allow = dict.fromkeys(one.allowed_hosts or other.allowed_hosts)
    both = Egress(
        mode="allowlist" if "allowlist" in modes else "open",
        allowed_hosts=tuple(allow),
        allowed_cidrs=tuple(cidr for cidr in one.allowed_cidrs if cidr in other.allowed_cidrs),
        max_connections=min(one.max_connections, other.max_connections),
        max_mib_per_s=min(one.max_mib_per_s, other.max_mib_per_s),
    )
    rules = EgressRules(both)
    headers = [header for header in one.headers if header in other.headers]
    targets = {header: parse_authority(header.host, HTTP_PORT) for header in headers}
    kept = tuple(header for header in headers if rules.refusal(targets[header]) is None)
    return replace(both, headers=kept)


def expanded_hosts(egress: Egress) -> list[str]:
    """Return the allowed hosts, with presets replaced by their hosts."""
    return [host for entry in egress.allowed_hosts for host in PRESETS.get(entry, (entry,))]


def _parse_rule(entry: str) -> _Rule:
    is_wildcard = entry.startswith("*.")
    bare = entry.removeprefix("*.")
    try:
        if _HOST_WITH_PORT.fullmatch(bare):
            target = parse_authority(bare)
            host, ports = target.host, frozenset({target.port})
        else:
            host, ports = parse_host(bare), WEB_PORTS
    except ValueError as error:
        raise ValueError(f"{entry!r} is not a valid rule: {error}") from error
    if is_wildcard and parse_address(host):
        raise ValueError(f"{entry!r} is not a valid rule: an IP address has no subdomains")
    if ports is WEB_PORTS and "." not in host and ":" not in host:
        presets = ", ".join(PRESETS)
        raise ValueError(f"{entry!r} is no preset ({presets}); a host without a dot needs a port")
    return _Rule(host, is_wildcard, ports)
