"""What is right and wrong of an answer of a given form."""

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
def test_an_answer_in_its_form_lacks_nothing(form: AnswerForm, answer: str) -> None:
    assert answer_error(form, answer) is None


@pytest.mark.parametrize(
    ("form", "answer", "fault"),
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
def test_answer_error_names_the_violation(form: AnswerForm, answer: str, fault: str) -> None:
    assert fault in (answer_error(form, answer) or "")


def test_answer_error_is_truncated() -> None:
    fault = answer_error(AnswerForm({"enum": ["a"]}), json.dumps("b" * 100_000))
    assert fault is not None
    assert len(fault) < MAX_ERROR_CHARS + 10


@pytest.mark.parametrize(
    ("schema", "fault"),
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
def test_a_schema_is_judged_without_looking_elsewhere(
    schema: dict[str, Any], fault: str | None
) -> None:
    found = schema_error(schema)
    assert found is None if fault is None else fault in (found or "")


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ('\n```\n{"a": 1}\n```\n', '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),
        ('Here:\n```json\n{"a": 1}\n```', 'Here:\n```json\n{"a": 1}\n```'),
    ],
)
def test_a_fence_around_the_whole_answer_is_taken_off(answer: str, inside: str) -> None:
    assert strip_code_fence(answer) == inside
