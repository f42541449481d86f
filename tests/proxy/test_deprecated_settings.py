"""Old spellings of settings: each row of the table, in config.yaml and in requests."""

from dataclasses import fields
from typing import Any

import pytest

from policies.budgets import DailyBudget
from policies.egress import Egress
from policies.isolation import Isolation
from proxy.config import Config, ConfigError, parse
from proxy.deprecated_settings import (
    CONFIG_RENAMES,
    PROFILE_RENAMES,
    PROFILE_VALUES,
    REQUEST_RULES,
    RenamedSetting,
    RenamedValue,
    upgrade,
)
from proxy.profiles import build_profiles

RULE = {"name": "r", "pattern": "x", "action": "deny"}
VALUES: dict[str, tuple[Any, Any]] = {
    "backend.attempts": (5, 4),
    "backend.kind": ("litellm", "litellm"),
    "computer": ("never", "never"),
    "manner.kind": ("reference", "reference"),
    "weak_models": (["m"], ["m"]),
    "isolation.egress.mode": ("open", "open"),
    "isolation.egress.allow": (["pypi"], ["pypi"]),
    "isolation.egress.allow_cidrs": (["10.0.0.0/8"], ["10.0.0.0/8"]),
    "isolation.egress.headers": ([], []),
    "sandbox.isolation.level": ("strict", "strict"),
    "sandbox.pool.idle": (3, 3),
    "server.state_dir": ("/data", "/data"),
    "redact.secrets": (["aws"], ["aws"]),
    "redact.patterns": ([{"name": "n", "pattern": "x"}], [{"name": "n", "pattern": "x"}]),
    "watch.rules.*.over": ("file", "file"),
}
"""An old value and the new one; any other setting is a number."""


def tree_with(path: str, value: Any) -> Any:
    for key in reversed(path.split(".")):
        value = [{**RULE, **value}] if key == "*" else {key: value}
    return value


def values_of(rename: RenamedSetting) -> tuple[Any, Any]:
    """Return a value of the old setting, and that of the new one."""
    return VALUES.get(
        rename.old.replace("sandbox.isolation.egress", "isolation.egress"), (600, 600)
    )


@pytest.mark.parametrize("rename", CONFIG_RENAMES, ids=lambda rename: rename.old)
def test_old_setting_name_in_config_works_like_the_new_name_with_a_warning(
    rename: RenamedSetting, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = values_of(rename)
    other_settings = (
        {"isolation": {"network": {"mode": "allowlist"}}} if rename.old.endswith("allow") else {}
    )
    expected = merged(other_settings, tree_with(rename.new, new))
    assert parse(merged(other_settings, tree_with(rename.old, old)), "c.yaml") == parse(
        expected, "c.yaml"
    )
    assert caplog.messages == [f"c.yaml: {rename.old} is deprecated: write {rename.new}"]


def merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: merged(base.get(key, {}), value) for key, value in over.items()}}


@pytest.mark.parametrize("rename", PROFILE_RENAMES, ids=lambda rename: rename.old)
def test_old_setting_name_in_a_profile_works_like_the_new_name_with_a_warning(
    rename: RenamedSetting, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = values_of(rename)
    other_settings = (
        {"isolation": {"network": {"mode": "allowlist"}}} if rename.old.endswith("allow") else {}
    )
    found = parse(
        {"profiles": {"mine": merged(other_settings, tree_with(rename.old, old))}}, "c.yaml"
    )
    assert found.profiles["mine"] == merged(other_settings, tree_with(rename.new, new))
    build_profiles(found)
    place, star = "profiles.mine.", ("*", "0")
    assert caplog.messages == [
        f"c.yaml: {place}{rename.old.replace(*star)} is deprecated:"
        f" write {place}{rename.new.replace(*star)}"
    ]


@pytest.mark.parametrize("place", ["models", "keys"])
def test_old_setting_name_in_a_policy_works_like_the_new_name(place: str) -> None:
    policy = {"computer": "never"}
    models = {"models": {"m": {"policy": policy}}}
    keys = {"keys": [{"name": "k", "env": "K", "policy": policy}]}
    config = parse(models if place == "models" else keys, "c.yaml")
    found = config.models["m"].policy if place == "models" else config.keys[0].policy
    assert found == {"enabled": "never"}


@pytest.mark.parametrize("value", PROFILE_VALUES, ids=lambda value: f"{value.setting}-{value.old}")
def test_old_value_of_a_setting_becomes_the_new_value_with_a_warning(value: RenamedValue) -> None:
    warnings: list[str] = []
    tree = tree_with(value.setting, value.old)
    assert upgrade(tree, REQUEST_RULES, warnings.append) == tree_with(value.setting, value.new)
    assert warnings == [
        f"{value.setting.replace('*', '0')}: {value.old} is deprecated: write {value.new}"
    ]


def test_old_value_in_a_list_setting_becomes_the_new_value() -> None:
    found = parse({"redact": {"secrets": ["keys", "aws"]}}, "c.yaml")
    assert found.redaction.detectors == ("all", "aws")


def test_old_and_new_name_of_one_setting_are_an_error_that_names_both() -> None:
    tree = {"backend": {"kind": "openai", "provider": "openai"}}
    with pytest.raises(ConfigError) as raised:
        parse(tree, "c.yaml")
    assert str(raised.value) == (
        "c.yaml: backend.kind and backend.provider are the same setting: remove backend.kind"
    )


def test_old_and_new_section_with_different_settings_are_merged() -> None:
    tree = {"isolation": {"network": {"mode": "open"}, "egress": {"max_connections": 3}}}
    network = parse(tree, "c.yaml").isolation.network
    assert (network.mode, network.max_connections) == ("open", 3)


def test_parsing_old_names_does_not_change_the_given_settings() -> None:
    tree = {"backend": {"kind": "openai"}, "watch": {"rules": [{**RULE, "over": "file"}]}}
    parse(tree, "c.yaml")
    assert tree == {"backend": {"kind": "openai"}, "watch": {"rules": [{**RULE, "over": "file"}]}}


@pytest.mark.parametrize(
    "tree",
    [
        {"sandbox": {"agent": "python"}},
        {"isolation": {"egress": {"max_mib": 5}}},
        {"sandbox": {"isolation": {"egress": {"max_mib": 5}}}},
    ],
)
def test_removed_setting_is_ignored_with_a_warning(
    tree: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(tree, "c.yaml") == Config()
    assert "has no effect" in caplog.text


def test_server_api_key_env_becomes_the_first_key(caplog: pytest.LogCaptureFixture) -> None:
    other_key = {"name": "more", "env": "MORE"}
    config = parse({"server": {"api_key_env": "MINE"}, "keys": [other_key]}, "c.yaml")
    assert [(key.name, key.env) for key in config.keys] == [("default", "MINE"), ("more", "MORE")]
    assert caplog.messages == [
        "c.yaml: server.api_key_env is deprecated: write keys: [{name: default, env: MINE}]"
    ]


def test_null_in_server_api_key_env_adds_no_key() -> None:
    assert parse({"server": {"api_key_env": None}}, "c.yaml") == Config()


def test_every_setting_of_a_moved_section_has_an_entry_for_its_old_name() -> None:
    new = {rename.new for rename in (*CONFIG_RENAMES, *PROFILE_RENAMES)}
    isolation = {field.name for field in fields(Isolation)} - {"network"}
    assert {f"isolation.{name}" for name in isolation} <= new
    assert {f"isolation.network.{field.name}" for field in fields(Egress)} <= new
    assert {f"budgets.daily.{field.name}" for field in fields(DailyBudget)} <= new
