"""Canonical spelling of hosts, and refusal of ambiguous spellings."""

import pytest

from policies.hosts import Target, parse_authority, parse_host


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("pypi.org", "pypi.org"),
        ("PyPI.Org", "pypi.org"),
        ("pypi.org.", "pypi.org"),
        ("_dmarc.pypi.org", "_dmarc.pypi.org"),
        ("localhost", "localhost"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("\uff50\uff59\uff50\uff49.org", "pypi.org"),
        ("ⅷ.example", "viii.example"),
        ("93.184.215.14", "93.184.215.14"),
        ("127.0.0.1.", "127.0.0.1"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[::ffff:127.0.0.1]", "::ffff:7f00:1"),
    ],
)
def test_host_is_parsed_into_its_canonical_form(written: str, host: str) -> None:
    assert parse_host(written) == host


@pytest.mark.parametrize(
    "written",
    [
        "",
        ".",
        "..",
        ".pypi.org",
        "pypi..org",
        "pypi.org..",
        "-pypi.org",
        "pypi-.org",
        "*.pypi.org",
        "pypi.org\x00.evil.example",
        "pypi.org\nHost: evil.example",
        "pypi.org\tx",
        "pypi org",
        "pypi%2eorg",
        "pypi.org/",
        "pypi.org\\evil.example",
        "pypi.org#evil.example",
        "pypi.org?evil.example",
        "user@pypi.org",
        "a" * 64 + ".org",
        "a." * 127 + "org",
        "a" * 100_000,
        "faß.example",
        "pypi。org",
        "a\u200db.example",
        "\ud800.example",
    ],
)
def test_malformed_host_name_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"host|xn--|address"):
        parse_host(written)


@pytest.mark.parametrize(
    "written",
    [
        "2130706433",
        "017700000001",
        "0x7f000001",
        "0x7F.0.0.1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "127.0.0.01",
        "127.0.0.256",
        "127.0.0.0x1",
        "1.2.3.4.5",
        "allowed.example.1",
        "0x",
        "fe80::1%eth0",
        "[fe80::1%25eth0]",
        "[::1",
        "::1]",
        "[[::1]]",
        "[::ffff:127.0.0.1.]",
        "[127.0.0.1]",
        "1:2",
        "::g",
    ],
)
def test_unusual_spelling_of_an_address_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"address|host name"):
        parse_host(written)


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("pypi.org:443", Target("pypi.org", 443)),
        ("PYPI.ORG.:0443", Target("pypi.org", 443)),
        ("pypi.org", Target("pypi.org", 80)),
        ("[2001:db8::1]:8080", Target("2001:db8::1", 8080)),
        ("[2001:db8::1]", Target("2001:db8::1", 80)),
        ("10.0.0.1:65535", Target("10.0.0.1", 65535)),
    ],
)
def test_authority_is_parsed_as_host_and_port(written: str, target: Target) -> None:
    assert parse_authority(written, default_port=80) == target


@pytest.mark.parametrize(
    "written",
    [
        "",
        ":443",
        "pypi.org:",
        "pypi.org:0",
        "pypi.org:65536",
        "pypi.org:+443",
        "pypi.org:-1",
        "pypi.org: 443",
        "pypi.org:443:80",
        "pypi.org:٤٤٣",
        "2001:db8::1:443",
        "[2001:db8::1]443",
        "user@pypi.org:443",
        "user:secret@pypi.org:443",
        "pypi.org:443@evil.example:443",
        "pypi.org:443\n",
    ],
)
def test_malformed_authority_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"host|port|user name"):
        parse_authority(written, default_port=80)


def test_authority_without_a_port_is_refused_if_there_is_no_default_port() -> None:
    with pytest.raises(ValueError, match="has no port"):
        parse_authority("pypi.org")


def test_connection_target_is_equal_after_formatting_and_parsing() -> None:
    for target in (Target("pypi.org", 443), Target("2001:db8::1", 80)):
        assert parse_authority(str(target)) == target
