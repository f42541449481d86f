"""Routing of requests to a sandbox or to the backend."""

from pathlib import Path
from typing import Any

import pytest

from policies.profile import Profile
from policies.routing import REASON_SENTENCES, ROUTE_REASONS, Route, RouteReason, choose_route
from policies.tool_support import NoToolsReason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "lookup"}}], "tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "lookup"}}},
        {"tool_choice": None, "functions": []},
        {"functions": [{"name": "f"}], "function_call": "auto"},
        {"modalities": ["text"], "input_ids": None, "add_generation_prompt": True},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_request_that_does_not_exclude_tools_is_routed_to_a_sandbox(fields: dict[str, Any]) -> None:
    assert choose_route({"model": "qwen3", **fields}, {}) == Route("sandbox", "qwen3", "auto")


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        ({"model": "qwen3:plain"}, "qwen3", "plain_suffix"),
        ({"model": "a:b:plain"}, "a:b", "plain_suffix"),
        ({"model": "qwen3:plain:plain"}, "qwen3:plain", "plain_suffix"),
        ({"model": "m", "tool_choice": "none"}, "m", "tool_choice_none"),
        ({"model": "m", "function_call": "none"}, "m", "tool_choice_none"),
        ({"model": "m", "modalities": ["text", "audio"]}, "m", "not_text"),
        (
            {"model": "m", "continue_final_message": True},
            "m",
            "continued_message",
        ),
        (
            {"model": "m", "add_generation_prompt": False},
            "m",
            "continued_message",
        ),
        ({"model": "m", "input_ids": [1]}, "m", "backend_state"),
        ({"model": "m", "bootstrap_room": 0}, "m", "backend_state"),
    ],
)
def test_request_that_excludes_tools_is_routed_to_the_backend(
    body: dict[str, Any], model: str, reason: RouteReason
) -> None:
    assert choose_route(body, {}) == Route("plain", model, reason)


@pytest.mark.parametrize("model", ["plain", "qwen3:plainer", "qwen3:PLAIN", ":plain/qwen3"])
def test_only_the_exact_plain_suffix_routes_to_the_backend(model: str) -> None:
    assert choose_route({"model": model}, {}).kind == "sandbox"


def test_every_request_goes_to_the_backend_if_sandbox_enabled_is_never() -> None:
    never = Profile(enabled="never")
    assert choose_route({"model": "m", "tools": [{}]}, {}, never) == Route("plain", "m", "never")


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "none"}, {"max_tokens": 1}, {"tools": [{}]}]
)
def test_every_request_gets_a_sandbox_if_sandbox_enabled_is_always(fields: dict[str, Any]) -> None:
    always = Profile(enabled="always", skip_models=("m",))
    assert choose_route({"model": "m", **fields}, {}, always) == Route("sandbox", "m", "always")


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("m:plain", {}, "plain_suffix"),
        ("m", {"modalities": ["text", "audio"]}, "not_text"),
    ],
)
def test_request_that_cannot_have_a_sandbox_is_refused_if_sandbox_enabled_is_always(
    model: str, fields: dict[str, Any], reason: RouteReason
) -> None:
    always = Profile(enabled="always")
    assert choose_route({"model": model, **fields}, {}, always) == Route("refused", "m", reason)


@pytest.mark.parametrize(
    ("model", "kind"), [("Qwen3-4B", "plain"), ("Qwen3-4B-FP8", "plain"), ("Qwen3-40B", "sandbox")]
)
def test_skipped_model_is_routed_to_the_backend(model: str, kind: str) -> None:
    profile = Profile(skip_models=("Qwen3-4B", "Qwen3-4B-*"))
    assert choose_route({"model": model}, {}, profile).kind == kind


@pytest.mark.parametrize("reason", ["no_tool_support", "tools_ignored", "tools_refused"])
def test_model_without_tool_support_gets_no_sandbox(reason: NoToolsReason) -> None:
    assert choose_route({"model": "m"}, {}, no_tools=reason) == Route("plain", "m", reason)
    always = Profile(enabled="always")
    assert choose_route({"model": "m"}, {}, always, reason) == Route("refused", "m", reason)


def test_model_with_failed_tool_calls_keeps_its_sandbox_if_sandbox_enabled_is_always() -> None:
    body, failed = {"model": "m"}, "tools_failed"
    assert choose_route(body, {}, no_tools="tools_failed") == Route("plain", "m", failed)
    always = Profile(enabled="always")
    assert choose_route(body, {}, always, "tools_failed") == Route("sandbox", "m", "always")


def test_every_route_reason_has_a_sentence_and_is_in_the_manual() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/reference/answer.md").read_text(encoding="utf-8")
    assert set(REASON_SENTENCES) == set(ROUTE_REASONS)
    assert [word for word in ROUTE_REASONS if f"`{word}`" not in page] == []
