"""Verdicts on whether a model supports tools, and their validity."""

import pytest

from policies.tool_support import (
    SUPPORTED,
    UNVERSIONED_VERDICT_TTL_S,
    KnownVerdict,
    is_local,
    shows_no_tool_support,
    tools_ignored_verdict,
    tools_refused_verdict,
)


@pytest.mark.parametrize(
    ("found_version", "version", "age", "outdated"),
    [
        ("1", "1", 1e9, False),
        ("1", "2", 0.0, True),
        ("1", None, 0.0, True),
        (None, "1", 0.0, True),
        (None, None, UNVERSIONED_VERDICT_TTL_S - 1, False),
        (None, None, UNVERSIONED_VERDICT_TTL_S, True),
    ],
)
def test_tool_verdict_expires_when_the_version_changes_or_after_a_day_without_a_version(
    found_version: str | None, version: str | None, age: float, outdated: bool
) -> None:
    assert (
        KnownVerdict(SUPPORTED, found_version, 100.0).is_outdated(version, 100.0 + age) is outdated
    )


@pytest.mark.parametrize(
    ("trouble", "has_run_commands", "evidence"),
    [
        ((), False, False),
        (("malformed_call",), False, True),
        (("malformed_call",), True, False),
        (("echo",), True, True),
        (("malformed_call", "runaway"), True, True),
    ],
)
def test_malformed_calls_are_evidence_against_tool_support_only_if_no_command_ran(
    trouble: tuple[str, ...], has_run_commands: bool, evidence: bool
) -> None:
    assert shows_no_tool_support(trouble, has_run_commands=has_run_commands) is evidence


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://10.0.0.7/v1", True),
        ("http://localhost:8000/v1", True),
        ("http://vllm:8000/v1", True),
        ("http://gpu.internal/v1", True),
        ("http://8.8.8.8/v1", False),
        ("https://api.openai.com/v1", False),
    ],
)
def test_server_in_a_private_network_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize(
    ("refusal", "change"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
            "Start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER",
        ),
        ("tools param requires --jinja flag", "Start llama.cpp's server with --jinja"),
        ("a:latest does not support tools", "Serve a model, or a template, that supports tools"),
    ],
)
def test_tool_refusal_message_says_how_to_change_the_server(refusal: str, change: str) -> None:
    message = tools_refused_verdict("m", refusal).message
    assert refusal in message
    assert change in message
    assert "backend.tool_support: never" in message


def test_tool_verdict_header_is_short_printable_ascii_for_any_model_name() -> None:
    value = tools_ignored_verdict("模型\r\nx: y").header_value
    assert value.isascii()
    assert value.isprintable()
    assert len(tools_refused_verdict("m", "no tools " * 10_000).header_value) < 1000
