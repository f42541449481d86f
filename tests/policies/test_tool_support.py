"""What decides whether a model is given tools, and how long that holds."""

import pytest

from policies.tool_support import (
    HOLDS_WITHOUT_VERSION_S,
    SUPPORTED,
    KnownVerdict,
    ignored_verdict,
    is_evidence,
    is_local,
    refused_verdict,
)


@pytest.mark.parametrize(
    ("found", "version", "age", "outdated"),
    [
        ("1", "1", 1e9, False),
        ("1", "2", 0.0, True),
        ("1", None, 0.0, True),
        (None, "1", 0.0, True),
        (None, None, HOLDS_WITHOUT_VERSION_S - 1, False),
        (None, None, HOLDS_WITHOUT_VERSION_S, True),
    ],
)
def test_a_verdict_holds_for_a_version_or_a_day(
    found: str | None, version: str | None, age: float, outdated: bool
) -> None:
    assert KnownVerdict(SUPPORTED, found, 100.0).is_outdated(version, 100.0 + age) is outdated


@pytest.mark.parametrize(
    ("trouble", "ran", "evidence"),
    [
        ((), False, False),
        (("malformed_call",), False, True),
        (("malformed_call",), True, False),
        (("echo",), True, True),
        (("malformed_call", "runaway"), True, True),
    ],
)
def test_only_trouble_is_evidence_and_no_single_bad_call(
    trouble: tuple[str, ...], ran: bool, evidence: bool
) -> None:
    assert is_evidence(trouble, has_run_commands=ran) is evidence


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
def test_a_server_of_the_operators_own_is_told_by_its_address(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
            "Start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER",
        ),
        ("tools param requires --jinja flag", "Start llama.cpp's server with --jinja"),
        ("a:latest does not support tools", "Serve a model, or a template, that supports tools"),
    ],
)
def test_a_refusal_says_what_to_change(said: str, change: str) -> None:
    words = refused_verdict("m", said).message
    assert said in words
    assert change in words
    assert "backend.tool_support: always" in words


def test_the_words_fit_into_a_header_whatever_the_model_is_called() -> None:
    told = ignored_verdict("模型\r\nx: y").header_value
    assert told.isascii()
    assert told.isprintable()
    assert len(refused_verdict("m", "no tools " * 10_000).header_value) < 1000
