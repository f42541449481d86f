"""Precedence of profile, model policy, key policy and request: each may only restrict further."""

from dataclasses import replace
from typing import Any

import pytest

from policies.egress import Egress
from policies.profile import (
    SETTING_ORDERS,
    EffectivePolicy,
    Profile,
    get_setting,
    setting_paths,
    with_setting,
)
from policies.rules import Rule

PROFILE = Profile()
PYPI = Egress("allowlist", allowed_hosts=("pypi",))
DENY, FLAG = Rule("a", "command", "rm", "deny"), Rule("b", "command", "rm", "log")
NUMBERS = [
    path
    for path in setting_paths(PROFILE)
    if path not in SETTING_ORDERS
    and isinstance(get_setting(PROFILE, path), int | float)
    and not isinstance(get_setting(PROFILE, path), bool)
]


def profile_with(path: str, value: Any, profile: Profile = PROFILE) -> Profile:
    return with_setting(profile, path, value)


@pytest.mark.parametrize("path", NUMBERS)
def test_request_may_lower_but_not_raise_any_numeric_setting(path: str) -> None:
    allowed = get_setting(PROFILE, path)
    assert EffectivePolicy(PROFILE).refusal(profile_with(path, allowed / 2), [path]) is None
    assert EffectivePolicy(PROFILE).refusal(profile_with(path, allowed), [path]) is None
    refusal = EffectivePolicy(PROFILE).refusal(profile_with(path, allowed + 1), [path])
    assert refusal
    assert (refusal.path, refusal.bound_by) == (path, "profile 'default'")


@pytest.mark.parametrize(
    ("path", "allowed", "requested", "is_allowed"),
    [
        ("enabled", "auto", "never", True),
        ("enabled", "auto", "always", True),
        ("enabled", "always", "never", False),
        ("enabled", "always", "auto", False),
        ("enabled", "never", "auto", False),
        ("enabled", "never", "never", True),
        ("prompt", "compute_first", "none", True),
        ("inputs.offload_text_over_tokens", 100, None, True),
        ("inputs.offload_text_over_tokens", None, 100, True),
        ("isolation.level", "standard", "strict", True),
        ("isolation.level", "strict", "standard", False),
        ("inputs.fetch_urls", True, False, True),
        ("inputs.fetch_urls", False, True, False),
        ("audit.enabled", True, False, False),
        ("audit.enabled", False, True, True),
        ("audit.required", True, False, False),
        ("watch.rules", (DENY,), (DENY, FLAG), True),
        ("watch.rules", (DENY,), (FLAG, DENY), False),
        ("watch.rules", (DENY,), (), False),
        ("redaction.detectors", ("aws",), ("aws", "jwt"), True),
        ("redaction.detectors", ("all",), (), False),
        ("isolation.network", Egress("open"), PYPI, True),
        ("isolation.network", PYPI, Egress(), True),
        ("isolation.network", Egress(), PYPI, False),
        ("isolation.network", PYPI, Egress("open"), False),
        ("isolation.network", PYPI, Egress("allowlist", allowed_hosts=("pypi.org:443",)), True),
        ("isolation.network", PYPI, Egress("allowlist", allowed_hosts=("pypi.org:22",)), False),
        ("isolation.network", PYPI, Egress("allowlist", allowed_hosts=("pypi.org", "npm")), False),
        (
            "isolation.network",
            Egress("allowlist", allowed_hosts=("*.example.org",)),
            Egress("allowlist", allowed_hosts=("a.example.org", "*.b.example.org")),
            True,
        ),
        (
            "isolation.network",
            Egress("allowlist", allowed_hosts=("*.example.org",)),
            Egress("allowlist", allowed_hosts=("example.org",)),
            False,
        ),
        (
            "isolation.network",
            Egress("allowlist", allowed_hosts=("example.org",)),
            Egress("allowlist", allowed_hosts=("*.example.org",)),
            False,
        ),
        ("isolation.network", PYPI, replace(PYPI, max_mib_per_s=9000), False),
        ("isolation.network", PYPI, replace(PYPI, allowed_cidrs=("10.0.0.0/8",)), False),
    ],
)
def test_request_may_set_only_stricter_values_of_non_numeric_settings(
    path: str, allowed: Any, requested: Any, is_allowed: bool
) -> None:
    base = profile_with(path, allowed)
    assert (
        EffectivePolicy(base).refusal(profile_with(path, requested, base), [path]) is None
    ) is is_allowed


def test_key_policy_restricts_the_model_policy_and_is_named_in_refusals() -> None:
    by_model = EffectivePolicy(PROFILE).with_restrictions(
        profile_with("limits.max_turns", 50), ["limits.max_turns"], "model 'm'"
    )
    by_key = by_model.with_restrictions(
        profile_with("limits.max_turns", 20), ["limits.max_turns"], "key 'k'"
    )
    assert by_key.profile.limits.max_turns == 20
    refusal = by_key.refusal(profile_with("limits.max_turns", 30), ["limits.max_turns"])
    assert refusal
    assert refusal.message() == "limits.max_turns: 30 is more than key 'k' allows (20)."


def test_key_setting_that_is_less_strict_than_the_profile_has_no_effect() -> None:
    key_profile = profile_with("limits.max_turns", 500)
    assert EffectivePolicy(PROFILE).with_restrictions(
        key_profile, ["limits.max_turns"], "key 'k'"
    ) == EffectivePolicy(PROFILE)


@pytest.mark.parametrize(
    ("profile", "key", "expected"),
    [
        (PYPI, Egress("open"), PYPI),
        (Egress("open"), PYPI, PYPI),
        (PYPI, Egress(), Egress()),
        (Egress(), Egress("open"), Egress()),
        (
            PYPI,
            Egress("allowlist", allowed_hosts=("npm", "pypi.org:443")),
            Egress("allowlist", allowed_hosts=("pypi.org:443",)),
        ),
        (PYPI, Egress("allowlist", allowed_hosts=("npm",)), Egress("allowlist")),
        (replace(PYPI, max_mib_per_s=5), replace(PYPI, max_connections=2), None),
    ],
)
def test_egress_of_profile_and_key_is_intersected(
    profile: Egress, key: Egress, expected: Egress | None
) -> None:
    path = "isolation.network"
    base = profile_with(path, profile)
    restricted = EffectivePolicy(base).with_restrictions(
        profile_with(path, key, base), [path], "key 'k'"
    )
    found = restricted.profile.isolation.network
    for bound in (profile, key):
        assert (
            EffectivePolicy(profile_with(path, bound)).refusal(profile_with(path, found), [path])
            is None
        )
    if expected is None:
        assert (found.max_mib_per_s, found.max_connections) == (5, 2)
    else:
        assert (found.mode, found.allowed_hosts) in [
            (expected.mode, expected.allowed_hosts),
            _without_presets(expected),
        ]


def _without_presets(egress: Egress) -> tuple[str, tuple[str, ...]]:
    return egress.mode, tuple(
        host
        for entry in egress.allowed_hosts
        for host in (("pypi.org", "files.pythonhosted.org") if entry == "pypi" else (entry,))
    )


@pytest.mark.parametrize(
    ("field", "allowed", "requested", "is_stricter", "both"),
    [
        ("allow_types", None, (".csv",), True, (".csv",)),
        ("allow_types", (".csv",), None, False, (".csv",)),
        ("allow_types", (".csv", ".md"), (".md",), True, (".md",)),
        ("allow_types", ("image/*",), ("image/png",), True, ("image/png",)),
        ("allow_types", ("image/png", ".md"), ("image/*",), False, ("image/png",)),
        ("allow_types", (".csv",), (".md",), False, ()),
        ("deny_types", (), (".html",), True, (".html",)),
        ("deny_types", (".html",), (), False, (".html",)),
        ("deny_types", ("text/html",), ("text/*",), True, ("text/*",)),
        ("deny_types", (".html",), (".svg",), False, (".html", ".svg")),
    ],
)
def test_fewer_allowed_types_and_more_denied_types_are_stricter(
    field: str, allowed: Any, requested: Any, is_stricter: bool, both: Any
) -> None:
    path = f"artifacts.{field}"
    base, wanted = (with_setting(Profile(), path, value) for value in (allowed, requested))
    assert (EffectivePolicy(base).refusal(wanted, [path]) is None) is is_stricter
    assert (
        get_setting(EffectivePolicy(base).with_restrictions(wanted, [path], "key").profile, path)
        == both
    )
