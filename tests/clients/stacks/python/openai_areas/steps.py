"""The steps of a run, selected by header and by body, streamed and not."""

from typing import Any

import pytest
from chat import answer, ask, sandbox_of
from model import Script, bash, submits

COMMAND = "echo seen"
BY: dict[str, Any] = {
    "header": lambda profile: {"extra_headers": {"X-Sandbox-Steps": profile}},
    "body": lambda profile: {"extra_body": {"sandbox": {"steps": profile}}},
}
PROFILES = ("off", "reasoning", "items", "events")
KINDS = ["run_started", "tool_start", "tool_end", "run_finished"]

of_each = pytest.mark.parametrize("profile", PROFILES)
in_both_ways = pytest.mark.parametrize("by", BY)


def works() -> Script:
    return Script({**bash(COMMAND), "reasoning": "Look."}, submits("Seen."))


@of_each
@in_both_ways
def test_answer_shows_the_selected_steps(client: Any, profile: str, by: str) -> None:
    done = ask(client, works(), **BY[by](profile))
    thought = done.choices[0].message.model_extra.get("reasoning_content", "")
    beside = sandbox_of(done)
    shown = {
        "answer": answer(done),
        "calls": done.choices[0].message.tool_calls,
        "thinks": thought.startswith("Look."),
        "command": f"$ {COMMAND}" in thought,
        "items": [each["type"] for each in beside.get("items", [])],
        "events": [each["kind"] for each in beside.get("events", [])],
    }
    assert shown == {
        "answer": "Seen.",
        "calls": None,
        "thinks": True,
        "command": profile == "reasoning",
        "items": ["function_call", "function_call_output"] if profile == "items" else [],
        "events": KINDS if profile == "events" else [],
    }


@of_each
@in_both_ways
def test_stream_shows_the_selected_steps(client: Any, profile: str, by: str) -> None:
    chunks = list(ask(client, works(), stream=True, **BY[by](profile)))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    thought = "".join(each.delta.model_extra.get("reasoning_content", "") for each in choices)
    beside = [chunk.model_extra.get("sandbox", {}) for chunk in chunks]
    outputs = [each["text"] for each in beside if "text" in each]
    assert "".join(each.delta.content or "" for each in choices) == "Seen."
    assert [each.delta.tool_calls for each in choices] == [None] * len(choices)
    assert [each.finish_reason for each in choices if each.finish_reason] == ["stop"]
    assert (f"$ {COMMAND}" in thought) == (profile == "reasoning")
    assert outputs == (["seen\n"] if profile == "events" else [])
    keys = {key for chunk in chunks for key in chunk.model_extra}
    assert ("item" in keys) == (profile == "items")
