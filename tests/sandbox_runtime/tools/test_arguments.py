"""The arguments of a tool call are accepted if their meaning is unambiguous, else explained."""

import pytest

from sandbox_runtime.tools.base import ToolInputError, ToolSchema, expected_shape, parse_arguments
from sandbox_runtime.tools.bash import SCHEMA as BASH

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "example",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "mode": {"type": "string", "enum": ["read", "write"]},
                "count": {"type": "integer"},
                "range": {"type": "array", "items": {"type": "integer"}},
                "note": {"type": "string"},
            },
            "required": ["mode"],
        },
    },
}
SHAPE = (
    '{"mode": <read | write>, "count": <integer, optional>,'
    ' "range": <array of integers, optional>, "note": <string, optional>}'
)


def test_valid_arguments_are_unchanged() -> None:
    given = {"mode": "read", "count": 3, "range": [1, -1], "note": " as\nit is "}
    assert parse_arguments(SCHEMA, given) == given


def test_null_argument_counts_as_absent() -> None:
    assert parse_arguments(SCHEMA, {"mode": "read", "count": None, "range": None}) == {
        "mode": "read"
    }


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"count": "3"}, {"count": 3}),
        ({"count": " -12 "}, {"count": -12}),
        ({"count": 3.0}, {"count": 3}),
        ({"range": "[1, 5]"}, {"range": [1, 5]}),
        ({"range": ["1", 5.0]}, {"range": [1, 5]}),
    ],
)
def test_argument_of_another_type_is_converted_if_its_value_is_unambiguous(
    given: dict[str, object], taken: dict[str, object]
) -> None:
    assert parse_arguments(SCHEMA, {"mode": "read", **given}) == {"mode": "read", **taken}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"count": True}, "'count' must be an integer, not a boolean"),
        ({"count": 2.5}, "'count' must be an integer, not a number"),
        ({"count": "three"}, "'count' must be an integer, not a string"),
        ({"count": "9" * 5000}, "'count' must be an integer, not a string"),
        ({"range": 5}, "'range' must be an array of integers, not a number"),
        ({"range": "[" * 100_000}, "'range' must be an array of integers, not a string"),
        ({"range": "1-5"}, "'range' must be an array of integers, not a string"),
        ({"range": [1, [2]]}, "'range' must be an integer, not an array"),
        ({"note": ["ls"]}, "'note' must be a string, not an array"),
        ({"note": {"a": 1}}, "'note' must be a string, not an object"),
        ({"note": "half \ud83d"}, "'note' holds half of a surrogate pair"),
        ({"mode": "delete"}, "'mode' must be one of read, write, not 'delete'"),
        ({"speed": 1}, "'speed' is unknown"),
    ],
)
def test_error_names_the_wrong_argument_and_the_expected_shape(
    given: dict[str, object], problem: str
) -> None:
    with pytest.raises(ToolInputError) as caught:
        parse_arguments(SCHEMA, {"mode": "read", **given})
    assert problem in str(caught.value)
    assert str(caught.value).endswith(f"Expected {SHAPE}.")


def test_all_wrong_arguments_are_reported_together() -> None:
    with pytest.raises(ToolInputError) as caught:
        parse_arguments(BASH, {"cmd": "ls"})
    assert str(caught.value) == (
        "Nothing was done: the arguments of execute_bash are wrong: 'cmd' is unknown;"
        " 'command' is missing. Expected {\"command\": <string>,"
        ' "timeout_s": <integer, optional>, "job_id": <string, optional>}.'
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [("ls", "a string"), (["ls"], "an array"), (3, "a number"), (True, "a boolean")],
)
def test_arguments_other_than_an_object_are_refused(arguments: object, kind: str) -> None:
    with pytest.raises(ToolInputError, match=f"they are {kind}, not an object") as caught:
        parse_arguments(BASH, arguments)
    assert '{"command": <string>, "timeout_s"' in str(caught.value)


def test_missing_arguments_count_as_an_empty_object() -> None:
    with pytest.raises(ToolInputError, match="'mode' is missing"):
        parse_arguments(SCHEMA, None)


def test_expected_shape_of_tool_arguments_is_described_in_one_line() -> None:
    assert expected_shape(SCHEMA) == SHAPE
