import pytest

from policies.takeover import may_be_repeated


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
        ("another_tool", None),
    ],
)
def test_edits_typed_text_and_unknown_tools_may_not_be_repeated(
    tool: str, arguments: object
) -> None:
    assert not may_be_repeated(tool, arguments)
