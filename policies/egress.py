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
"""Names in `allow` that stand for several hosts."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_RESERVED_HEADERS = frozenset(
    {"connection", "content-length", "host", "te", "transfer-encoding", "upgrade"}
)
_WITH_PORT = re.compile(r"(?:\[.*\]|[^:]*):[^:\]]*")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BoundHeader:
    """A secret that is added to plain HTTP requests to one host, outside the sandbox.

    It cannot be added to requests that TLS encrypts. The sandbox sees it only if the host sends it
    back.
    """

    host: str
    """`host` or `host:port` (80 without a port)."""
    name: str
    """The header; it replaces one that the program sent."""
    env: str
    """Name of the environment variable with the value."""


@dataclass(frozen=True, slots=True)
class Egress:
    """Rules for connections out of a sandbox. Raises ValueError for an invalid rule."""

    mode: Literal["none", "allowlist", "open"] = "none"
    """open: every public host, on every port. In any mode port 80 carries only HTTP and port 443
    only TLS, so that the traffic there shows its destination."""
    allow: tuple[str, ...] = ()
    """allowlist: hosts (`pypi.org`), all below one (`*.pypi.org`), either with a port (80 and 443
    without one), addresses, presets (pypi, npm, debian, conda, huggingface, github)."""
    allow_cidrs: tuple[str, ...] = ()
    """Networks whose addresses count as public. In allowlist mode a rule must name the host too."""
    headers: tuple[BoundHeader, ...] = ()
    max_connections: int = 64
    """At one time."""
    max_mib: int = 8192
    """Both ways together, in the sandbox's whole life."""
    max_mib_per_s: float = 100.0
    """Both ways together; a second's worth may pass at once."""

    def __post_init__(self) -> None:
        if self.max_connections < 1 or self.max_mib < 1 or self.max_mib_per_s < 0.1:
            raise ValueError("max_connections and max_mib are at least 1, max_mib_per_s 0.1")
        EgressRules(self)


@dataclass(frozen=True, slots=True)
class _Rule:
    host: str
    below: bool
    """True if the rule is for all hosts below `host` and not for `host` itself."""
    ports: frozenset[int]

    def matches(self, target: Target) -> bool:
        if target.port not in self.ports:
            return False
        return target.host.endswith("." + self.host) if self.below else target.host == self.host

    def covers(self, other: "_Rule") -> bool:
        """Return True if this rule matches all that the other matches."""
        is_below = other.host.endswith("." + self.host)
        inside = (
            is_below or (other.below and other.host == self.host)
            if self.below
            else (other.host == self.host and not other.below)
        )
        return inside and other.ports <= self.ports


class EgressRules:
    """An Egress with its rules parsed."""

    def __init__(self, egress: Egress) -> None:
        if egress.allow and egress.mode != "allowlist":
            raise ValueError(f"allow means nothing in mode {egress.mode}: it needs mode: allowlist")
        self._mode = egress.mode
        self._written = tuple(expanded_hosts(egress))
        self._rules = tuple(_parse_rule(host) for host in self._written)
        self._networks = tuple(parse_network(cidr) for cidr in egress.allow_cidrs)
        self._headers = tuple((self._bound_target(header), header) for header in egress.headers)

    def refusal(self, target: Target) -> str | None:
        """Return why the target is denied, in words for the program, or None if it is allowed."""
        if self._mode == "none":
            return "this sandbox has no network"
        if self._mode == "open" or any(rule.matches(target) for rule in self._rules):
            return None
        what = f"host {target.host}"
        if any(
            rule.matches(Target(target.host, port)) for rule in self._rules for port in rule.ports
        ):
            what = f"port {target.port} of host {target.host}"
        return f"{what} is not in this sandbox's allowlist (allowed: {self._summary()})"

    def is_reachable(self, address: IPAddress) -> bool:
        """Return True if a connection may go to this address, whatever name resolved to it."""
        return is_public(address) or any(address in network for network in self._networks)

    def headers_for(self, target: Target) -> tuple[BoundHeader, ...]:
        """Return the headers that are added to plain HTTP requests to the target."""
        return tuple(header for bound, header in self._headers if bound == target)

    def _summary(self) -> str:
        shown = ", ".join(self._written[:_SHOWN]) or "nothing"
        more = len(self._written) - _SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

    def _bound_target(self, header: BoundHeader) -> Target:
        target = parse_authority(header.host, HTTP_PORT)
        if not _HEADER_NAME.fullmatch(header.name) or header.name.lower() in _RESERVED_HEADERS:
            raise ValueError(f"{header.name!r} is no header that can be bound to a host")
        only_tls = any(rule.matches(Target(target.host, TLS_PORT)) for rule in self._rules)
        if target.port == TLS_PORT or (self.refusal(target) and only_tls):
            raise ValueError(
                f"header {header.name} cannot be bound to {header.host}: requests to port"
                f" {TLS_PORT} leave the sandbox encrypted, and the proxy cannot add to them"
            )
        if refusal := self.refusal(target):
            raise ValueError(f"header {header.name} is bound to {header.host}, but {refusal}")
        return target


def is_subset(asked: Egress, allowed: Egress) -> bool:
    """Return True if `allowed` permits all that `asked` does."""
    if asked.mode == "none":
        return True
    if allowed.mode == "none" or (asked.mode == "open" and allowed.mode != "open"):
        return False
    return (
        (allowed.mode == "open" or set(_covered(asked, allowed)) == set(expanded_hosts(asked)))
        and set(asked.allow_cidrs) <= set(allowed.allow_cidrs)
        and set(asked.headers) <= set(allowed.headers)
        and asked.max_connections <= allowed.max_connections
        and asked.max_mib <= allowed.max_mib
        and asked.max_mib_per_s <= allowed.max_mib_per_s
    )


def _covered(asked: Egress, allowed: Egress) -> list[str]:
    """Return the rules of `asked` of which `allowed` permits every target."""
    bounds = [_parse_rule(host) for host in expanded_hosts(allowed)]
    return [
        host
        for host in expanded_hosts(asked)
        if any(bound.covers(_parse_rule(host)) for bound in bounds)
    ]


def intersection(one: Egress, other: Egress) -> Egress:
    """Return the rules for what both permit: of two that overlap, the narrower."""
    modes = {one.mode, other.mode}
    if "none" in modes:
        return Egress()
    if modes == {"allowlist"}:
        allow = dict.fromkeys([*_covered(one, other), *_covered(other, one)])
    else:
        allow = dict.fromkeys(one.allow or other.allow)
    both = Egress(
        mode="allowlist" if "allowlist" in modes else "open",
        allow=tuple(allow),
        allow_cidrs=tuple(each for each in one.allow_cidrs if each in other.allow_cidrs),
        max_connections=min(one.max_connections, other.max_connections),
        max_mib=min(one.max_mib, other.max_mib),
        max_mib_per_s=min(one.max_mib_per_s, other.max_mib_per_s),
    )
    rules = EgressRules(both)
    headers = [each for each in one.headers if each in other.headers]
    targets = {each: parse_authority(each.host, HTTP_PORT) for each in headers}
    kept = tuple(each for each in headers if rules.refusal(targets[each]) is None)
    return replace(both, headers=kept)


def expanded_hosts(egress: Egress) -> list[str]:
    """Return the hosts of the rules, presets spelled out."""
    return [host for entry in egress.allow for host in PRESETS.get(entry, (entry,))]


def _parse_rule(entry: str) -> _Rule:
    below = entry.startswith("*.")
    bare = entry.removeprefix("*.")
    try:
        if _WITH_PORT.fullmatch(bare):
            target = parse_authority(bare)
            host, ports = target.host, frozenset({target.port})
        else:
            host, ports = parse_host(bare), WEB_PORTS
    except ValueError as error:
        raise ValueError(f"{entry!r} is no rule: {error}") from error
    if below and parse_address(host):
        raise ValueError(f"{entry!r} is no rule: nothing is below an address")
    if ports is WEB_PORTS and "." not in host and ":" not in host:
        presets = ", ".join(PRESETS)
        raise ValueError(f"{entry!r} is no preset ({presets}); a host without a dot needs a port")
    return _Rule(host, below, ports)
