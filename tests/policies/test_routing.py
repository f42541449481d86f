"""Which requests get a computer."""

from typing import Any

import pytest

from policies.routing import Route, route


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
def test_a_request_gets_a_computer(fields: dict[str, Any]) -> None:
    assert route({"model": "qwen3", **fields}) == Route("sandbox", "qwen3", "default")


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        ({"model": "qwen3:plain"}, "qwen3", "the model's name ends in :plain"),
        ({"model": "a:b:plain"}, "a:b", "the model's name ends in :plain"),
        ({"model": "qwen3:plain:plain"}, "qwen3:plain", "the model's name ends in :plain"),
        ({"model": "m", "tool_choice": "none"}, "m", "tool_choice forbids tools"),
        ({"model": "m", "function_call": "none"}, "m", "tool_choice forbids tools"),
        ({"model": "m", "modalities": ["text", "audio"]}, "m", "the answer is not text alone"),
        (
            {"model": "m", "continue_final_message": True},
            "m",
            "it continues a message that is begun",
        ),
        (
            {"model": "m", "add_generation_prompt": False},
            "m",
            "it continues a message that is begun",
        ),
        ({"model": "m", "input_ids": [1]}, "m", "it belongs to one call of one server"),
        ({"model": "m", "bootstrap_room": 0}, "m", "it belongs to one call of one server"),
    ],
)
def test_a_request_that_cannot_or_will_not_use_tools_goes_straight_on(
    body: dict[str, Any], model: str, reason: str
) -> None:
    assert route(body) == Route("plain", model, reason)


@pytest.mark.parametrize("model", ["plain", "qwen3:plainer", "qwen3:PLAIN", ":plain/qwen3"])
def test_only_the_whole_suffix_counts(model: str) -> None:
    assert route({"model": model}).kind == "sandbox"
