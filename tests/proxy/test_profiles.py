"""Selection of a request's profile, and the settings that a request may restrict."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.profile import Profile
from proxy.config import ConfigError, parse
from proxy.errors import BadRequestError, ForbiddenError
from proxy.keys import Key, Keyring
from proxy.profiles import Profiles, build_profiles, shipped_profiles

ANYONE = Key()
NO_NETWORK = {"isolation": {"network": {"mode": "none"}}}
FINANCE = yaml.safe_load(
    (Path(__file__).parents[2] / "examples" / "configs" / "finance.yaml").read_text("utf-8")
)
STUDENT = Key("student", ("default", "research"), {"limits": {"max_turns": 20}})


def profiles(**tree: Any) -> Profiles:
    return build_profiles(parse(tree, "c.yaml"))


def config_error(**tree: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        profiles(**tree)
    return str(raised.value)


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profile_describes_its_purpose(name: str) -> None:
    profile = profiles().by_name[name]
    assert profile.name == name
    assert len(profile.about) > 80


def test_finance_example_is_audited_and_denies_broker_hosts() -> None:
    finance = profiles(**FINANCE).default
    assert finance.name == "finance"
    assert finance.audit.enabled
    assert finance.redaction.patterns_by_name
    for target in ("api.binance.com:443", "trade-coinbase.example:443", "KRAKEN.com:443"):
        rule = finance.watch.first_match("egress", target)
        assert rule is not None
        assert rule.action == "deny"
    for target in ("stats.example.com:443", "octokraken.com:443", "pypi.org:443"):
        assert finance.watch.first_match("egress", target) is None


def test_request_cannot_leave_an_audited_profile_for_one_without_audit() -> None:
    watched = profiles(**FINANCE)
    for name in ("default", "research", "strict"):
        with pytest.raises(ForbiddenError):
            watched.select(ANYONE, "m", name, {})


def test_error_for_an_unknown_profile_lists_only_the_profiles_of_the_key() -> None:
    with pytest.raises(BadRequestError, match="'research'") as raised:
        profiles().select(STUDENT, "m", "fast", {})
    assert "'paper'" not in str(raised.value)


def test_policy_of_a_key_adds_rules_and_removes_none() -> None:
    rule = {"name": "own", "target": "command", "pattern": "rm", "action": "deny"}
    key = Key("k", ("finance",), {"watch": {"rules": [rule]}, "audit": {"enabled": False}})
    profile = profiles(**FINANCE).select(key, "m", None, {})
    assert [rule.name for rule in profile.watch.rules] == ["order-hosts", "own"]
    assert profile.audit.enabled


def test_rules_and_detectors_of_a_profile_are_added_to_those_of_config_yaml() -> None:
    rule = {"name": "own", "target": "command", "pattern": "rm", "action": "deny"}
    secret = {"name": "badge", "pattern": "B-[0-9]+"}
    redaction = {"detectors": ["aws"], "patterns": [secret]}
    found = profiles(**FINANCE, watch={"rules": [rule]}, redaction=redaction).by_name
    assert [rule.name for rule in found["finance"].watch.rules] == ["own", "order-hosts"]
    assert [rule.name for rule in found["default"].watch.rules] == ["own"]
    assert found["finance"].redaction.detectors == ("aws", "all")
    assert [each.name for each in found["finance"].redaction.patterns] == ["badge"]


def test_policy_with_allowed_hosts_opens_no_network_in_a_profile_without_a_network() -> None:
    key = Key("k", ("strict", "research"), {"isolation": {"network": {"allowed_hosts": ["pypi"]}}})
    found = profiles()
    assert found.select(key, "m", "strict", {}).isolation == found.by_name["strict"].isolation
    egress = found.select(key, "m", "research", {}).isolation.network
    assert (egress.mode, egress.allowed_hosts) == ("allowlist", ("pypi",))


def test_profile_strict_limits_inputs_and_fetches_no_urls() -> None:
    inputs = profiles().by_name["strict"].inputs
    assert (inputs.fetch_urls, inputs.max_file_mib, inputs.max_total_mib) == (False, 16, 32)


def test_settings_of_config_yaml_apply_to_profiles_that_do_not_set_them() -> None:
    found = profiles(limits={"max_turns": 7}).by_name
    assert found["default"].limits.max_turns == 7
    assert found["strict"].limits.max_turns == 30


def test_operators_profile_inherits_from_the_profile_it_extends() -> None:
    found = profiles(profiles={"lab": {"extends": "research", "limits": {"max_turns": 9}}}).by_name
    assert found["lab"].limits.max_turns == 9
    assert found["lab"].limits.max_run_seconds == found["research"].limits.max_run_seconds
    assert found["lab"].isolation == found["research"].isolation


@pytest.mark.parametrize(
    ("key", "model", "requested", "expected"),
    [
        (ANYONE, "m", None, "default"),
        (ANYONE, "m", "strict", "strict"),
        (STUDENT, "m", None, "default"),
        (STUDENT, "m", "research", "research"),
        (Key("lab", ("research", "default")), "m", None, "research"),
        (ANYONE, "qwen3-4b-fp8", None, "strict"),
        (Key("lab", ("research", "strict")), "qwen3-4b", None, "strict"),
        (Key("lab", ("research",)), "qwen3-4b", None, "research"),
    ],
)
def test_profile_is_taken_from_request_or_model_or_key_or_server_in_this_order(
    key: Key, model: str, requested: str | None, expected: str
) -> None:
    found = profiles(models={"qwen3-4b*": {"profile": "strict"}})
    assert found.select(key, model, requested, {}).name == expected


def test_profile_that_allows_more_than_the_default_needs_a_key_that_lists_it() -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().select(ANYONE, "m", "research", {})
    assert (raised.value.status, raised.value.param) == (403, "sandbox.profile")
    assert "Profile 'research' needs a key that lists it" in raised.value.message
    assert "limits.max_turns: 200 is more than profile 'default' allows (100)" in (
        raised.value.message
    )


def test_unknown_profile_is_an_error_that_lists_the_profiles() -> None:
    with pytest.raises(BadRequestError, match="There is no profile 'fast': one of 'default', "):
        profiles().select(ANYONE, "m", "fast", {})


def test_request_may_ask_for_less_than_its_key_allows() -> None:
    found = profiles().select(STUDENT, "m", None, {"limits": {"max_turns": 5}, "enabled": "never"})
    assert (found.limits.max_turns, found.enabled) == (5, "never")


@pytest.mark.parametrize(
    ("key", "tree", "message", "param"),
    [
        (
            STUDENT,
            {"limits": {"max_turns": 21}},
            "limits.max_turns: 21 is more than key 'student' allows (20).",
            "sandbox.limits.max_turns",
        ),
        (
            ANYONE,
            {"isolation": {"network": {"mode": "open"}}},
            "isolation.network: open is more than profile 'default' allows (none).",
            "sandbox.isolation.network",
        ),
        (
            Key("free", policy={"enabled": "always"}),
            {"enabled": "never"},
            "enabled: never is more than key 'free' allows (always).",
            "sandbox.enabled",
        ),
    ],
)
def test_error_for_a_request_beyond_its_policy_names_the_bound(
    key: Key, tree: Any, message: str, param: str
) -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().select(key, "m", None, tree)
    assert (raised.value.message, raised.value.param) == (message, param)


@pytest.mark.parametrize(
    ("tree", "param"),
    [
        ({"limits": {"turns": 5}}, "sandbox.limits.turns"),
        ({"limits": 5}, "sandbox.limits"),
        ({"limits": {"max_turns": "many"}}, "sandbox.limits.max_turns"),
        ({"limits": {"max_turns": -1}}, "sandbox.limits.max_turns"),
        ({"enabled": "sometimes"}, "sandbox.enabled"),
        (
            {"isolation": {"network": {"mode": "none", "allowed_hosts": ["pypi"]}}},
            "sandbox.isolation.network",
        ),
        ({"isolation": {"memory_mib": 0}}, "sandbox.isolation"),
        ({"isolation": {"pids": 0}}, "sandbox.isolation"),
        ({"isolation": {"cpus": 1e-10}}, "sandbox.isolation.cpus"),
        ({"isolation": {"memory_mib": 15}}, "sandbox.isolation.memory_mib"),
        ({"isolation": {"cpus": math.nan}}, "sandbox.isolation"),
        ({"isolation": {"cpus": math.inf}}, "sandbox.isolation.cpus"),
        ({"limits": {"max_run_seconds": math.inf}}, "sandbox.limits.max_run_seconds"),
        ({"limits": {"max_run_seconds": math.nan}}, "sandbox.limits.max_run_seconds"),
        ({"artifacts": {"deny_types": [".a"] * 257}}, "sandbox.artifacts.deny_types"),
        ({"watch": {"rules": [{}] * 100_000}}, "sandbox.watch.rules"),
        (
            {"isolation": {"network": {"allowed_hosts": [f"h{n}.com" for n in range(257)]}}},
            "sandbox.isolation.network.allowed_hosts",
        ),
    ],
)
def test_invalid_setting_of_a_request_is_a_bad_request(tree: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        profiles().select(ANYONE, "m", None, tree)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"profile": "fast"}, "profile: there is no profile 'fast'"),
        (
            {"profile": "offline"},
            "profile: there is no profile 'offline' any more: write isolation: {network: {mode:",
        ),
        (
            {"profiles": {"a": {"extends": "finance"}}},
            "profiles.a.extends: there is no profile 'finance' any more: copy it from"
            " examples/configs/finance.yaml",
        ),
        ({"profiles": {"a": {"extends": "b"}}}, "profiles.a.extends: there is no profile 'b'"),
        ({"profiles": {"a": {"limits": {"max_turn": 1}}}}, "profiles.a.limits.max_turn: "),
        ({"profiles": {"a": {"limits": {"max_turns": -1}}}}, "must not be negative"),
        (
            yaml.safe_load("limits: {max_run_seconds: .inf}"),
            "limits.max_run_seconds: must not be negative",
        ),
        (
            yaml.safe_load("profiles: {a: {limits: {max_cpu_s: .nan}}}"),
            "limits.max_cpu_s: must not",
        ),
        (
            yaml.safe_load("models: {m: {policy: {isolation: {cpus: .inf}}}}"),
            "models.m.policy.isolation.cpus: must not be negative or infinite",
        ),
        ({"profiles": {"a": {"isolation": {"pids": 0}}}}, "pids must be at least 8"),
        (
            {"profiles": {"a": {"isolation": {"disk_mib_per_s": 63}}}},
            "profiles.a.isolation.disk_mib_per_s: must be at least 64",
        ),
        ({"profiles": {"a": {"watch": {"rules": [{}] * 257}}}}, "has more than 256 entries"),
        ({"profiles": {"a": {"watch": {"ruls": []}}}}, "profiles.a.watch.ruls: "),
        ({"profiles": {"a": {"watch": None}}}, "profiles.a.watch: "),
        ({"models": {"m": {"profile": "b"}}}, "models.m.profile: there is no profile 'b'"),
        ({"models": {"m": {"policy": {"computr": "auto"}}}}, "models.m.policy.computr: "),
        ({"models": {"m": {"policy": {"name": "x"}}}}, "models.m.policy.name: "),
        (
            {"keys": [{"name": "k", "env": "K", "profiles": ["b"]}]},
            "keys.0.profiles: there is no profile 'b'",
        ),
        (
            {"keys": [{"name": "k", "env": "K", "policy": {"limits": {"max_turns": "x"}}}]},
            "keys.0.policy.limits.max_turns: ",
        ),
    ],
)
def test_invalid_profile_in_config_is_an_error_with_its_path(tree: Any, message: str) -> None:
    assert message in config_error(**tree)


def test_keyring_finds_the_key_of_a_secret() -> None:
    ring = Keyring([("sk-1", STUDENT)])
    assert (ring.find("sk-1"), ring.find("sk-2"), ring.find("")) == (STUDENT, None, None)
    assert Keyring().find("whatever") == ANYONE


def test_server_with_one_profile_uses_it_for_every_request() -> None:
    only = Profile(name="mine")
    assert Profiles.only(only).select(ANYONE, "m", None, {}) is only


def test_shipped_profiles_are_the_files_of_the_profiles_directory() -> None:
    bundles = Path(__file__).parents[2] / "policies" / "profiles"
    assert {path.stem for path in bundles.glob("*.yaml")} == shipped_profiles().keys()


def test_paper_profile_needs_a_key_that_lists_it() -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().select(ANYONE, "m", "paper", {})
    assert "Profile 'paper' needs a key that lists it" in str(raised.value)
    assert profiles().select(Key("k", ("paper",)), "m", None, {}).isolation.network.mode == "open"


@pytest.mark.parametrize(
    "restriction",
    [
        {"profiles": {"paper": {"extends": "paper", **NO_NETWORK}}},
        {"models": {"*": {"policy": NO_NETWORK}}},
    ],
)
def test_settings_can_remove_the_network_of_the_paper_profile_and_keep_its_limits(
    restriction: dict[str, Any],
) -> None:
    key = Key("k", ("paper",))
    paper = profiles().select(key, "m", None, {})
    found = profiles(**restriction).select(key, "m", None, {})
    assert (found.isolation.network.mode, found.limits) == ("none", paper.limits)
    by_key = profiles().select(Key("k", ("paper",), NO_NETWORK), "m", None, {})
    assert (by_key.isolation.network.mode, by_key.limits) == ("none", paper.limits)


def test_request_can_restrict_the_paper_profile_but_not_extend_it() -> None:
    key = Key("k", ("paper",))
    restrictions = {"limits": {"max_trajectory_tokens": 1000}, **NO_NETWORK}
    found = profiles().select(key, "m", None, restrictions)
    assert (found.limits.max_trajectory_tokens, found.isolation.network.mode) == (1000, "none")
    wider: list[dict[str, Any]] = [
        {"compact": True},
        {"final_question": True},
        {"max_trajectory_tokens": 131_072},
        {"max_trajectory_tokens": None},
        {"model_timeout_s": 1201},
    ]
    for limits in wider:
        with pytest.raises(ForbiddenError):
            profiles().select(key, "m", None, {"limits": limits})
    long = {"extends": "paper", "limits": {"max_trajectory_tokens": 131_072}}
    wide = profiles(profiles={"paper-long": long}).select(Key("k", ("paper-long",)), "m", None, {})
    assert wide.limits.max_trajectory_tokens == 131_072
    assert not wide.limits.compact
