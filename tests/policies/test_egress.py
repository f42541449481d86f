"""Rules for the hosts that a sandbox may reach."""

import ipaddress
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from policies.egress import PRESETS, BoundHeader, Egress, EgressRules
from policies.hosts import Target, parse_host


def refusal(egress: Egress, host: str, port: int = 443) -> str | None:
    return EgressRules(egress).refusal(Target(parse_host(host), port))


def allowlist(*allow: str) -> Egress:
    return Egress(mode="allowlist", allowed_hosts=allow)


def test_no_host_is_allowed_by_default() -> None:
    assert refusal(Egress(), "pypi.org") == "this sandbox has no network"


def test_open_mode_allows_every_host_and_port() -> None:
    egress = Egress(mode="open")
    assert refusal(egress, "pypi.org") is None
    assert refusal(egress, "8.8.8.8", 53) is None


@pytest.mark.parametrize(
    ("rule", "host", "port"),
    [
        ("pypi.org", "pypi.org", 443),
        ("pypi.org", "PYPI.ORG.", 80),
        ("PyPI.org.", "pypi.org", 443),
        ("bücher.example", "xn--bcher-kva.example", 443),
        ("xn--bcher-kva.example", "BÜCHER.example", 443),
        ("*.pypi.org", "a.pypi.org", 443),
        ("*.pypi.org", "a.b.pypi.org", 80),
        ("pypi.org:8443", "pypi.org", 8443),
        ("*.pypi.org:22", "a.pypi.org", 22),
        ("mirror:3141", "mirror", 3141),
        ("93.184.215.14", "93.184.215.14", 80),
        ("93.184.215.14:53", "93.184.215.14", 53),
        ("2606:4700::1111", "[2606:4700:0::1111]", 443),
        ("[2606:4700::1111]", "2606:4700::1111", 443),
        ("[2606:4700::1111]:53", "2606:4700::1111", 53),
        ("pypi", "files.pythonhosted.org", 443),
        ("github", "raw.githubusercontent.com", 443),
    ],
)
def test_egress_rule_allows_its_hosts_and_ports(rule: str, host: str, port: int) -> None:
    assert refusal(allowlist("unrelated.example", rule), host, port) is None


@pytest.mark.parametrize(
    ("rule", "host", "port"),
    [
        ("pypi.org", "a.pypi.org", 443),
        ("pypi.org", "evilpypi.org", 443),
        ("pypi.org", "pypi.org.evil.example", 443),
        ("pypi.org", "pypi.org", 22),
        ("*.pypi.org", "pypi.org", 443),
        ("*.pypi.org", "apypi.org", 443),
        ("*.pypi.org:22", "a.pypi.org", 443),
        ("pypi.org:8443", "pypi.org", 443),
        ("93.184.215.14", "93.184.215.15", 443),
        ("93.184.215.14", "[::ffff:93.184.215.14]", 443),
        ("pypi", "pypi.python.org", 443),
    ],
)
def test_egress_rule_allows_no_other_hosts_and_ports(rule: str, host: str, port: int) -> None:
    assert refusal(allowlist(rule), host, port) is not None


def test_refusal_of_a_host_lists_the_allowed_hosts() -> None:
    assert refusal(allowlist("pypi"), "example.com") == (
        "host example.com is not in this sandbox's allowlist"
        " (allowed: pypi.org, files.pythonhosted.org)"
    )
    assert refusal(allowlist("pypi.org"), "pypi.org", 22) == (
        "port 22 of host pypi.org is not in this sandbox's allowlist (allowed: pypi.org)"
    )
    assert refusal(allowlist(), "pypi.org") == (
        "host pypi.org is not in this sandbox's allowlist (allowed: nothing)"
    )


def test_long_list_of_allowed_hosts_in_a_refusal_is_truncated() -> None:
    text = refusal(allowlist(*(f"{n}.example" for n in range(30))), "example.com")
    assert text is not None
    assert text.endswith("6.example, 7.example and 22 more)")


@pytest.mark.parametrize(
    ("allow", "complaint"),
    [
        ("pipy", r"'pipy' is no preset \(pypi, npm, debian, conda, huggingface, github\)"),
        ("", "'' is not a valid rule"),
        ("*", "'\\*' is not a valid rule"),
        ("*.", "is not a valid rule"),
        ("*.*.org", "is not a valid rule"),
        ("a.*.org", "is not a valid rule"),
        ("*.10.0.0.1", "an IP address has no subdomains"),
        ("https://pypi.org", "is not a valid rule"),
        ("pypi.org/simple", "is not a valid rule"),
        ("pypi.org:https", "is not a valid rule: 'pypi.org:https' is not host:port"),
        ("pypi.org:0", "has no port from 1 to 65535"),
        ("pypi.org:", "is not a valid rule"),
        ("user@pypi.org", "is not a valid rule"),
        ("10.0.0.0/8", "is not a valid rule"),
        ("127.1", "write four decimal numbers"),
        ("faß.example", "write its xn-- form"),
        (" pypi.org", "is not a valid rule"),
    ],
)
def test_invalid_egress_rule_is_an_error(allow: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        allowlist(allow)


@pytest.mark.parametrize("mode", ["none", "open"])
def test_allowed_hosts_in_a_mode_that_ignores_them_are_an_error(mode: Any) -> None:
    with pytest.raises(ValueError, match=f"allowed_hosts has no effect in mode {mode}"):
        Egress(mode=mode, allowed_hosts=("pypi",))


@pytest.mark.parametrize("caps", [{"max_connections": 0}, {"max_mib_per_s": 0.0}], ids=str)
def test_connection_or_rate_cap_of_zero_is_an_error(caps: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Egress(**caps)


def test_every_egress_preset_consists_of_valid_rules() -> None:
    for name, hosts in PRESETS.items():
        for host in hosts:
            assert refusal(allowlist(name), host.replace("*", "any")) is None


def test_private_address_is_reachable_only_in_an_allowed_network() -> None:
    private, loopback = ipaddress.ip_address("10.1.2.3"), ipaddress.ip_address("127.0.0.1")
    rules = EgressRules(Egress(mode="open", allowed_cidrs=("10.1.0.0/16", "fd00::/8")))
    assert rules.is_reachable(private)
    assert rules.is_reachable(ipaddress.ip_address("fd00::1"))
    assert not rules.is_reachable(loopback)
    assert not rules.is_reachable(ipaddress.ip_address("::ffff:10.1.2.3"))
    assert not EgressRules(Egress(mode="open")).is_reachable(private)
    assert rules.is_reachable(ipaddress.ip_address("93.184.215.14"))


def test_allowed_cidrs_do_not_extend_the_allowed_hosts() -> None:
    egress = Egress(mode="allowlist", allowed_hosts=("pypi.org",), allowed_cidrs=("10.0.0.0/8",))
    assert refusal(egress, "10.0.0.1") is not None


def egress_with_headers(*headers: BoundHeader, **settings: Any) -> Egress:
    return Egress(
        **{"mode": "allowlist", "allowed_hosts": ("api.example:8080",), **settings}, headers=headers
    )


def test_header_is_bound_to_a_host_and_a_port() -> None:
    header = BoundHeader("API.example:8080", "X-Key", "KEY")
    rules = EgressRules(egress_with_headers(header))
    assert rules.headers_for(Target("api.example", 8080)) == (header,)
    assert rules.headers_for(Target("api.example", 80)) == ()
    assert rules.headers_for(Target("a.api.example", 8080)) == ()


@pytest.mark.parametrize(
    ("host", "allow"),
    [("api.example:443", "api.example"), ("api.example", "api.example:443")],
)
def test_bound_header_for_a_host_reached_only_on_port_443_is_refused(host: str, allow: str) -> None:
    with pytest.raises(ValueError, match="requests to port 443 leave the sandbox encrypted"):
        egress_with_headers(BoundHeader(host, "X-Key", "KEY"), allowed_hosts=(allow,))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (BoundHeader("other.example", "X-Key", "KEY"), "not in this sandbox's allowlist"),
        (BoundHeader("*.example:8080", "X-Key", "KEY"), "is not a host name"),
        (BoundHeader("api.example:8080", "X Key", "KEY"), "is not a header"),
        (BoundHeader("api.example:8080", "X-Key\r\nEvil", "KEY"), "is not a header"),
        (BoundHeader("api.example:8080", "Host", "KEY"), "is not a header"),
        (BoundHeader("api.example:8080", "Content-Length", "KEY"), "is not a header"),
    ],
    ids=str,
)
def test_header_bound_to_an_invalid_host_or_with_an_invalid_name_is_refused(
    header: BoundHeader, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        egress_with_headers(header)


def test_parsed_egress_settings_equal_constructed_settings_and_are_hashable() -> None:
    read = TypeAdapter(Egress).validate_python(
        {
            "mode": "allowlist",
            "allowed_hosts": ["pypi", "api.example:8080"],
            "headers": [{"host": "api.example:8080", "name": "X-Key", "env": "KEY"}],
        }
    )
    written = egress_with_headers(
        BoundHeader("api.example:8080", "X-Key", "KEY"), allowed_hosts=("pypi", "api.example:8080")
    )
    assert read == written
    assert {read: 1}[written] == 1


def test_error_for_an_invalid_rule_in_configuration_has_the_reason() -> None:
    with pytest.raises(ValidationError, match="'pipy' is no preset"):
        TypeAdapter(Egress).validate_python({"mode": "allowlist", "allowed_hosts": ["pipy"]})
