"""Matching of rules, and the refusals of their actions."""

from typing import Any

import pytest

from policies.rules import Rule, RuleSet, rule_subject

RULES = RuleSet(
    (
        Rule("reading", "command", r"^cat ", "log"),
        Rule("secrets", "command", r"(?i)secret", "deny", "they are not yours"),
        Rule("pushing", "command", r"\bgit\s+push\b", "deny"),
        Rule("keys", "file", r"\.pem$", "deny"),
        Rule("orders", "egress", r"^orders\.example\.com:443$", "deny"),
    )
)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ls", None),
        ("cat SECRETS", "reading"),
        ("ls; cat SECRETS", "secrets"),
        ("cd x && git  push -f", "pushing"),
        ("ls k.pem", None),
    ],
)
def test_only_the_first_matching_rule_applies(command: str, name: str | None) -> None:
    rule = RULES.first_match("command", command)
    assert (rule.name if rule else None) == name


def test_rule_applies_only_to_its_target() -> None:
    assert RULES.first_match("file", "/testbed/k.pem") == RULES.rules[3]
    assert RULES.first_match("egress", "orders.example.com:443") == RULES.rules[4]
    assert RULES.first_match("egress", "orders.example.com:4433") is None


def test_rule_refuses_unless_its_action_is_log() -> None:
    assert [rule.refusal for rule in RULES.rules[:3]] == [
        None,
        "rule secrets forbids this: they are not yours",
        "rule pushing forbids this",
    ]


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("execute_bash", {"command": "ls"}, ("command", "ls")),
        ("execute_bash", {"command": "y", "job_id": "1"}, ("command", "y")),
        ("execute_bash", {"command": ["ls"]}, None),
        ("execute_bash", {}, None),
        ("str_replace_editor", {"command": "view", "path": "a"}, ("file", "/testbed/a")),
        ("str_replace_editor", {"path": "/a/../b//c"}, ("file", "/b/c")),
        ("str_replace_editor", {"path": "//etc/passwd"}, ("file", "/etc/passwd")),
        ("str_replace_editor", {"path": "///etc//passwd"}, ("file", "/etc/passwd")),
        ("str_replace_editor", {"path": "//"}, ("file", "/")),
        ("str_replace_editor", {"path": 1}, None),
        ("submit", {"answer": "ls"}, None),
    ],
)
def test_rules_check_the_command_or_the_normalized_path_of_a_call(
    tool: str, arguments: dict[str, Any], expected: object
) -> None:
    assert rule_subject(tool, arguments) == expected


@pytest.mark.parametrize("pattern", ["(", "a**", "(?=a)", r"(a)\1", "a*", ""])
def test_rule_with_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a valid pattern"):
        Rule("rule", "command", pattern, "deny")


@pytest.mark.parametrize("name", ["", "a b", 'a"', "é", "a\n"])
def test_rule_name_that_cannot_be_a_metric_label_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a rule's name has letters"):
        Rule(name, "command", "a", "deny")


def test_rule_patterns_are_matched_in_linear_time_and_on_any_text() -> None:
    rule = Rule("slow", "command", r"(?:a+)+(?:a+)+(?:a+)+b", "deny")
    rules = RuleSet((rule,))
    assert rules.first_match("command", "a" * 200_000) is None
    assert rules.first_match("command", "\ud800é" + "a" * 9 + "b") == rule
