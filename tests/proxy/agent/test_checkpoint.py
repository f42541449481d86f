"""The stored form of checkpoints, and the calls that may be requested again."""

from dataclasses import replace

import pytest

from proxy.agent.checkpoint import MAX_CHECKPOINT_CHARS, Checkpoint, may_be_repeated
from proxy.agent.model import Completion
from proxy.agent.tool_calls import ToolCall, Turn

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


def test_checkpoint_survives_its_storage() -> None:
    text = CHECKPOINT.to_json()
    assert text is not None
    found = Checkpoint.from_json(text)
    assert found == CHECKPOINT
    assert [entry.kind for entry in found.history().entries] == ["theirs", "asked", "said"]


def test_checkpoints_have_command_ids_of_their_own() -> None:
    other = Checkpoint({}, CHECKPOINT.turn, CHECKPOINT.reply, [], 0, {}, 0, {})
    assert other.command_prefix != CHECKPOINT.command_prefix


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
def test_commands_and_calls_that_only_read_may_be_repeated(tool: str, arguments: object) -> None:
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
def test_edits_typed_text_and_unknown_tools_may_not_be_repeated(
    tool: str, arguments: object
) -> None:
    assert not may_be_repeated(tool, arguments)
