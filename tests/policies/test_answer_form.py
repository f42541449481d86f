"""Validation of answers against the form that the client requires, and of the form's schema."""

import json
from typing import Any

import pytest

from policies.answer_form import (
    ANY_JSON,
    ANY_OBJECT,
    MAX_ERROR_CHARS,
    AnswerForm,
    answer_error,
    schema_error,
    strip_code_fence,
)

PERSON = AnswerForm(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ages": {"items": {"type": "integer"}}},
        "required": ["name"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (ANY_OBJECT, "{}"),
        (ANY_OBJECT, ' {"a": [1, null]}\n'),
        (ANY_JSON, "7"),
        (PERSON, '{"name": "Ada", "ages": [1]}'),
        (AnswerForm({"pattern": "^(a+)+$"}), json.dumps("a" * 40)),
    ],
)
def test_valid_answer_has_no_error(form: AnswerForm, answer: str) -> None:
    assert answer_error(form, answer) is None


@pytest.mark.parametrize(
    ("form", "answer", "error"),
    [
        (ANY_OBJECT, "[]", '[] is not of type "object"'),
        (PERSON, "{}", '"name" is a required property'),
        (PERSON, '{"name": "Ada", "ages": [1, "b"]}', "['ages'][1]: \"b\" is not of type"),
        (PERSON, '{"name": "Ada", "age": 1}', "('age' was unexpected)"),
        (ANY_JSON, "", "It is not JSON"),
        (ANY_JSON, "Here: {}", "It is not JSON"),
        (ANY_JSON, '{"a": 1', "It is not JSON"),
        (ANY_JSON, '{"a": NaN}', "NaN is no JSON"),
        (ANY_JSON, "[" * 100_000, "It is not JSON"),
        (AnswerForm({"pattern": "^(a+)+$"}), json.dumps("a" * 40 + "!"), "does not match"),
    ],
)
def test_answer_error_names_the_violation(form: AnswerForm, answer: str, error: str) -> None:
    assert error in (answer_error(form, answer) or "")


def test_error_for_a_long_invalid_answer_is_truncated() -> None:
    error = answer_error(AnswerForm({"enum": ["a"]}), json.dumps("b" * 100_000))
    assert error is not None
    assert len(error) < MAX_ERROR_CHARS + 10


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({}, None),
        ({"type": "object", "$defs": {"a": {}}, "properties": {"b": {"$ref": "#/$defs/a"}}}, None),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "string"}, None),
        ({"type": "nonsense"}, '"nonsense" is not valid'),
        ({"pattern": "["}, "is not a"),
        ({"$ref": "http://127.0.0.1:9/other"}, "are not followed: http://127.0.0.1:9/other"),
        ({"$ref": "file:///etc/passwd"}, "are not followed"),
    ],
)
def test_schema_is_checked_and_external_references_are_refused(
    schema: dict[str, Any], error: str | None
) -> None:
    message = schema_error(schema)
    assert message is None if error is None else error in (message or "")


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ('\n```\n{"a": 1}\n```\n', '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),
        ('Here:\n```json\n{"a": 1}\n```', 'Here:\n```json\n{"a": 1}\n```'),
    ],
)
def test_code_fence_around_the_complete_answer_is_stripped(answer: str, inside: str) -> None:
    assert strip_code_fence(answer) == inside
