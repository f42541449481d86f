"""The stored form of checkpoints, and the calls that may be requested again."""

import json
from collections.abc import Iterable
from dataclasses import fields, replace

import pytest

from policies.artifacts import FileVersion
from proxy.agent.checkpoint import MAX_CHECKPOINT_CHARS, Checkpoint, may_be_repeated
from proxy.agent.model import Completion
from proxy.agent.tool_calls import ToolCall, Turn
from proxy.models.scripted import ScriptedModel, tool_reply
from sandbox_runtime.sandbox import SandboxReference
from tests.fakes.memory_sandbox import MemorySandbox, MemorySandboxes
from tests.proxy.agent.runs import SUBMIT, Run, bash

ENTRY = {
    "id": "a",
    "type": "function",
    "function": {"name": "execute_bash", "arguments": '{"command": "ls \\udcff"}'},
}
MESSAGE = {"role": "assistant", "content": None, "tool_calls": [ENTRY]}
CHECKPOINT = Checkpoint(
    sandbox={"guest": {"pod": "sandbox-1"}, "generation": 0, "jobs": {}},
    turn=Turn(
        MESSAGE,
        (
            ToolCall("a", "execute_bash", {"command": "ls \udcff"}, ENTRY),
            ToolCall("b", "execute_bash", None, ENTRY, '{"command', "The arguments are no JSON."),
        ),
        calls_are_text=False,
        has_more_calls=True,
    ),
    reply=Completion(MESSAGE, "tool_calls", {"total_tokens": 3}, response={"model": "m"}),
    messages=[{"role": "user", "content": "How many?"}, {"role": "user", "content": "!"}, MESSAGE],
    run_start_index=1,
    message_kinds={1: "asked"},
    wall_time_s=2.5,
    state={"budget": {"turns": 1}},
)
FIELDS_OF_VERSION_1 = {
    "checkpoint": "version sandbox turn reply messages run_start_index message_kinds wall_time_s"
    " state command_prefix",
    "turn": "message calls calls_are_text has_more_calls",
    "call": "id name arguments raw invalid_arguments mistake",
    "reply": "message finish_reason usage choice response stop_cause",
    "state": "budget conversation executor artifacts capabilities prose trouble",
    "budget": "turns commands cpu_s cost_usd _call_count _tokens _prompt_tokens _output_chars"
    " _reminded_levels _earlier_egress_bytes",
    "conversation": "usage usages trajectory has_used_tools",
    "executor": "steps shown_steps sandbox_losses peak_memory_bytes",
    "artifacts": "files is_complete",
    "trajectory": "llm_calls tokens env_tokens context_tokens known_tokens",
    "file": "bytes sha256",
}


def test_checkpoint_is_equal_after_it_was_written_and_read_as_json() -> None:
    text = CHECKPOINT.to_json()
    assert text is not None
    found = Checkpoint.from_json(text)
    assert found == CHECKPOINT
    assert [entry.kind for entry in found.history().entries] == ["theirs", "asked", "said"]


def test_each_checkpoint_has_its_own_prefix_for_command_ids() -> None:
    other = Checkpoint({}, CHECKPOINT.turn, CHECKPOINT.reply, [], 0, {}, 0, {})
    assert other.command_prefix != CHECKPOINT.command_prefix


class AdoptableSandbox(MemorySandbox):
    """A sandbox with a reference, with which nothing can be adopted."""

    def reference(self) -> SandboxReference:
        return {}


async def test_stored_checkpoint_has_exactly_the_fields_of_version_1() -> None:
    stored: list[Checkpoint] = []

    async def save(checkpoint: Checkpoint | None) -> bool:
        assert checkpoint
        stored.append(checkpoint)
        return True

    model = ScriptedModel([tool_reply(bash("true")), SUBMIT])
    run = Run(model, MemorySandboxes(make_sandbox=AdoptableSandbox))
    await run.go(save_checkpoint=save)
    (text,) = (checkpoint.to_json() for checkpoint in stored)
    assert text is not None
    value = json.loads(text)
    turn, state = value["turn"], value["state"]
    parts: dict[str, Iterable[str]] = {
        "checkpoint": value,
        "turn": turn,
        "call": turn["calls"][0],
        "reply": value["reply"],
        "state": state,
        **{name: state[name] for name in ("budget", "conversation", "executor", "artifacts")},
        "trajectory": state["conversation"]["trajectory"],
        "file": [field.name for field in fields(FileVersion)],
    }
    assert value["version"] == 1
    assert {name: set(part) for name, part in parts.items()} == {
        name: set(words.split()) for name, words in FIELDS_OF_VERSION_1.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1}',
        (CHECKPOINT.to_json() or "").replace('"finish_reason"', '"end_reason"'),
        (CHECKPOINT.to_json() or "").replace('"calls"', '"tool_calls"'),
        (CHECKPOINT.to_json() or "").replace('"run_start_index"', '"start_index"'),
    ],
)
def test_checkpoint_that_cannot_be_read_is_not_used(text: str) -> None:
    assert Checkpoint.from_json(text) is None


def test_checkpoint_of_another_version_is_not_used() -> None:
    text = CHECKPOINT.to_json()
    assert text is not None
    assert Checkpoint.from_json(text.replace('"version": 1', '"version": 2')) is None


def test_checkpoint_that_is_too_long_is_not_stored() -> None:
    message = {"role": "user", "content": "x" * MAX_CHECKPOINT_CHARS}
    assert replace(CHECKPOINT, messages=[message]).to_json() is None


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("execute_bash", {"command": "make"}),
        ("execute_bash", {"command": "", "job_id": "c1"}),
        ("str_replace_editor", {"command": "view", "path": "/testbed"}),
        ("submit", {"answer": "42"}),
    ],
)
def test_calls_that_start_a_command_or_have_no_effect_may_be_repeated_after_a_takeover(
    tool: str, arguments: object
) -> None:
    assert may_be_repeated(tool, arguments)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("execute_bash", {"command": "yes", "job_id": "c1"}),
        ("execute_bash", {"command": "C-c", "job_id": "c1"}),
        ("str_replace_editor", {"command": "insert", "path": "a", "insert_line": 1}),
        ("str_replace_editor", {"command": "str_replace", "path": "a"}),
        ("str_replace_editor", {"command": "undo_edit", "path": "a"}),
        ("another_tool", {}),
        ("another_tool", {"command": "view"}),
        ("another_tool", None),
    ],
)
def test_edit_and_job_input_and_unknown_tool_calls_may_not_be_repeated_after_a_takeover(
    tool: str, arguments: object
) -> None:
    assert not may_be_repeated(tool, arguments)
