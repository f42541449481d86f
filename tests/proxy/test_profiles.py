"""Which profile a request gets, and what it may ask of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.profile import Profile
from proxy.config import ConfigError, parse
from proxy.errors import BadRequestError, ForbiddenError
from proxy.keys import Key, Keyring
from proxy.profiles import Profiles, build_profiles, shipped

ANYONE = Key()
NO_NETWORK = {"isolation": {"egress": {"mode": "none"}}}
STUDENT = Key("student", ("default", "research"), {"limits": {"max_turns": 20}})


def profiles(**tree: Any) -> Profiles:
    return build_profiles(parse(tree, "c.yaml"))


def complaint(**tree: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        profiles(**tree)
    return str(raised.value)


@pytest.mark.parametrize("name", shipped())
def test_every_profile_that_is_shipped_says_in_a_paragraph_what_it_is_for(name: str) -> None:
    profile = profiles().named[name]
    assert profile.name == name
    assert len(profile.about) > 80


def test_finance_is_watched_and_places_no_orders() -> None:
    finance = profiles().named["finance"]
    assert finance.audit.enabled
    assert finance.redact.patterns_by_name
    for target in ("api.binance.com:443", "trade-coinbase.example:443", "KRAKEN.com:443"):
        assert finance.watch.first_match("egress", target)
    for target in ("stats.example.com:443", "octokraken.com:443", "pypi.org:443"):
        assert finance.watch.first_match("egress", target) is None


def test_who_is_written_down_cannot_ask_for_a_profile_in_which_he_is_not() -> None:
    watched = profiles(profile="finance")
    for name in ("default", "research", "strict"):
        with pytest.raises(ForbiddenError):
            watched.of(ANYONE, "m", name, {})


def test_who_names_a_profile_that_is_none_hears_of_those_that_are_open_to_him() -> None:
    with pytest.raises(BadRequestError, match="'research'") as raised:
        profiles().of(STUDENT, "m", "fast", {})
    assert "'paper'" not in str(raised.value)


def test_a_key_adds_rules_and_takes_none_away() -> None:
    rule = {"name": "own", "over": "command", "pattern": "rm", "action": "deny"}
    key = Key("k", ("finance",), {"watch": {"rules": [rule]}, "audit": {"enabled": False}})
    profile = profiles().of(key, "m", None, {})
    assert [rule.name for rule in profile.watch.rules] == ["order-hosts", "own"]
    assert profile.audit.enabled


def test_rules_and_secrets_of_a_bundle_come_behind_those_of_config_yaml() -> None:
    rule = {"name": "own", "over": "command", "pattern": "rm", "action": "deny"}
    secret = {"name": "badge", "pattern": "B-[0-9]+"}
    redact = {"secrets": ["aws"], "patterns": [secret]}
    found = profiles(watch={"rules": [rule]}, redact=redact).named
    assert [rule.name for rule in found["finance"].watch.rules] == ["own", "order-hosts"]
    assert [rule.name for rule in found["default"].watch.rules] == ["own"]
    assert found["finance"].redact.secrets == ("aws", "keys")
    assert [each.name for each in found["finance"].redact.patterns] == ["badge"]


def test_a_policy_of_hosts_alone_gives_a_profile_without_network_none() -> None:
    key = Key("k", ("strict", "research"), {"isolation": {"egress": {"allow": ["pypi"]}}})
    found = profiles()
    assert found.of(key, "m", "strict", {}).isolation == found.named["strict"].isolation
    egress = found.of(key, "m", "research", {}).isolation.egress
    assert (egress.mode, egress.allow) == ("allowlist", ("pypi",))


def test_strict_takes_little_in_and_fetches_nothing() -> None:
    inputs = profiles().named["strict"].inputs
    assert (inputs.fetch_urls, inputs.max_file_mib, inputs.max_total_mib) == (False, 16, 32)


def test_the_first_profile_is_what_config_yaml_says_for_all() -> None:
    found = profiles(limits={"max_turns": 7}).named
    assert found["default"].limits.max_turns == 7
    assert found["offline"].limits.max_turns == 7
    assert found["strict"].limits.max_turns == 30


def test_one_of_the_operators_own_differs_from_what_it_extends() -> None:
    found = profiles(profiles={"lab": {"extends": "research", "limits": {"max_turns": 9}}}).named
    assert found["lab"].limits.max_turns == 9
    assert found["lab"].limits.wall_time_s == found["research"].limits.wall_time_s
    assert found["lab"].isolation == found["research"].isolation


@pytest.mark.parametrize(
    ("key", "model", "asked", "gets"),
    [
        (ANYONE, "m", None, "default"),
        (ANYONE, "m", "offline", "offline"),
        (ANYONE, "m", "strict", "strict"),
        (STUDENT, "m", None, "default"),
        (STUDENT, "m", "research", "research"),
        (Key("lab", ("research", "default")), "m", None, "research"),
        (ANYONE, "qwen3-4b-fp8", None, "strict"),
        (Key("lab", ("research", "strict")), "qwen3-4b", None, "strict"),
        (Key("lab", ("research",)), "qwen3-4b", None, "research"),
    ],
)
def test_request_model_key_and_server_are_asked_in_turn_which_profile_it_is(
    key: Key, model: str, asked: str | None, gets: str
) -> None:
    found = profiles(models={"qwen3-4b*": {"profile": "strict"}})
    assert found.of(key, model, asked, {}).name == gets


def test_one_that_allows_more_needs_a_key_that_lists_it() -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().of(ANYONE, "m", "research", {})
    assert (raised.value.status, raised.value.param) == (403, "sandbox.profile")
    assert "Profile 'research' needs a key that lists it" in raised.value.message
    assert "limits.max_turns: 200 is more than profile 'default' allows (100)" in (
        raised.value.message
    )


def test_one_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadRequestError, match="There is no profile 'fast': one of 'default', "):
        profiles().of(ANYONE, "m", "fast", {})


def test_a_request_may_ask_for_less_than_its_key_allows() -> None:
    found = profiles().of(STUDENT, "m", None, {"limits": {"max_turns": 5}, "computer": "never"})
    assert (found.limits.max_turns, found.computer) == (5, "never")


@pytest.mark.parametrize(
    ("key", "tree", "words", "param"),
    [
        (
            STUDENT,
            {"limits": {"max_turns": 21}},
            "limits.max_turns: 21 is more than key 'student' allows (20).",
            "sandbox.limits.max_turns",
        ),
        (
            ANYONE,
            {"isolation": {"egress": {"mode": "open"}}},
            "isolation.egress: open is more than profile 'default' allows (none).",
            "sandbox.isolation.egress",
        ),
        (
            Key("free", policy={"computer": "always"}),
            {"computer": "never"},
            "computer: never is more than key 'free' allows (always).",
            "sandbox.computer",
        ),
    ],
)
def test_a_request_that_asks_for_more_is_told_who_allows_no_more(
    key: Key, tree: Any, words: str, param: str
) -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().of(key, "m", None, tree)
    assert (raised.value.message, raised.value.param) == (words, param)


@pytest.mark.parametrize(
    ("tree", "param"),
    [
        ({"limits": {"turns": 5}}, "sandbox.limits.turns"),
        ({"limits": 5}, "sandbox.limits"),
        ({"limits": {"max_turns": "many"}}, "sandbox.limits.max_turns"),
        ({"limits": {"max_turns": -1}}, "sandbox.limits.max_turns"),
        ({"computer": "sometimes"}, "sandbox.computer"),
        (
            {"isolation": {"egress": {"mode": "none", "allow": ["pypi"]}}},
            "sandbox.isolation.egress",
        ),
        ({"isolation": {"memory_mib": 0}}, "sandbox.isolation"),
        ({"isolation": {"pids": 0}}, "sandbox.isolation"),
        ({"isolation": {"cpus": 1e-10}}, "sandbox.isolation.cpus"),
        ({"isolation": {"memory_mib": 15}}, "sandbox.isolation.memory_mib"),
        ({"isolation": {"cpus": math.nan}}, "sandbox.isolation"),
        ({"isolation": {"cpus": math.inf}}, "sandbox.isolation.cpus"),
        ({"limits": {"wall_time_s": math.inf}}, "sandbox.limits.wall_time_s"),
        ({"limits": {"wall_time_s": math.nan}}, "sandbox.limits.wall_time_s"),
        ({"artifacts": {"deny_types": [".a"] * 257}}, "sandbox.artifacts.deny_types"),
        ({"watch": {"rules": [{}] * 100_000}}, "sandbox.watch.rules"),
        (
            {"isolation": {"egress": {"allow": [f"h{n}.com" for n in range(257)]}}},
            "sandbox.isolation.egress.allow",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_the_requests_mistake(tree: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        profiles().of(ANYONE, "m", None, tree)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"profile": "fast"}, "profile: there is no profile 'fast'"),
        ({"profiles": {"a": {"extends": "b"}}}, "profiles.a.extends: there is no profile 'b'"),
        ({"profiles": {"a": {"limits": {"max_turn": 1}}}}, "profiles.a.limits.max_turn: "),
        ({"profiles": {"a": {"limits": {"max_turns": -1}}}}, "must not be negative"),
        (yaml.safe_load("limits: {wall_time_s: .inf}"), "limits.wall_time_s: must not be negative"),
        (
            yaml.safe_load("profiles: {a: {limits: {max_cpu_s: .nan}}}"),
            "limits.max_cpu_s: must not",
        ),
        (
            yaml.safe_load("models: {m: {policy: {isolation: {cpus: .inf}}}}"),
            "models.m.policy.isolation.cpus: must not be negative, and not without end",
        ),
        ({"profiles": {"a": {"isolation": {"pids": 0}}}}, "pids is at least 8"),
        (
            {"profiles": {"a": {"isolation": {"disk_mib_per_s": 63}}}},
            "profiles.a.isolation.disk_mib_per_s: is at least 64",
        ),
        ({"profiles": {"a": {"watch": {"rules": [{}] * 257}}}}, "has more than 256 entries"),
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
def test_a_mistake_in_the_configuration_is_told_with_its_place(tree: Any, words: str) -> None:
    assert words in complaint(**tree)


def test_a_keyring_knows_who_comes_with_which_key() -> None:
    ring = Keyring([("sk-1", STUDENT)])
    assert (ring.find("sk-1"), ring.find("sk-2"), ring.find("")) == (STUDENT, None, None)
    assert Keyring().find("whatever") == ANYONE


def test_a_server_of_one_profile_gives_it_to_everybody() -> None:
    only = Profile(name="mine")
    assert Profiles.only(only).of(ANYONE, "m", None, {}) is only


def test_the_bundles_lie_beside_the_policies_they_are_of() -> None:
    bundles = Path(__file__).parents[2] / "policies" / "profiles"
    assert {path.stem for path in bundles.glob("*.yaml")} == shipped().keys()


def test_paper_has_an_open_network_only_where_the_operator_names_it() -> None:
    with pytest.raises(ForbiddenError) as raised:
        profiles().of(ANYONE, "m", "paper", {})
    assert "Profile 'paper' needs a key that lists it" in str(raised.value)
    assert profiles().of(Key("k", ("paper",)), "m", None, {}).isolation.egress.mode == "open"


@pytest.mark.parametrize(
    "narrower",
    [
        {"profiles": {"paper": {"extends": "paper", **NO_NETWORK}}},
        {"models": {"*": {"policy": NO_NETWORK}}},
    ],
)
def test_an_operator_takes_the_network_from_paper_and_leaves_the_rest(
    narrower: dict[str, Any],
) -> None:
    key = Key("k", ("paper",))
    paper = profiles().of(key, "m", None, {})
    found = profiles(**narrower).of(key, "m", None, {})
    assert (found.isolation.egress.mode, found.limits) == ("none", paper.limits)
    by_key = profiles().of(Key("k", ("paper",), NO_NETWORK), "m", None, {})
    assert (by_key.isolation.egress.mode, by_key.limits) == ("none", paper.limits)


def test_a_request_switches_off_what_paper_has_and_nothing_on() -> None:
    key = Key("k", ("paper",))
    asked = {"limits": {"max_trajectory_tokens": 1000}, **NO_NETWORK}
    found = profiles().of(key, "m", None, asked)
    assert (found.limits.max_trajectory_tokens, found.isolation.egress.mode) == (1000, "none")
    wider: list[dict[str, Any]] = [
        {"compact": True},
        {"final_question": True},
        {"max_trajectory_tokens": 131_072},
        {"max_trajectory_tokens": None},
        {"model_timeout_s": 1201},
    ]
    for limits in wider:
        with pytest.raises(ForbiddenError):
            profiles().of(key, "m", None, {"limits": limits})
    long = {"extends": "paper", "limits": {"max_trajectory_tokens": 131_072}}
    wide = profiles(profiles={"paper-long": long}).of(Key("k", ("paper-long",)), "m", None, {})
    assert wide.limits.max_trajectory_tokens == 131_072
    assert not wide.limits.compact
