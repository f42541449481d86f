"""Checks of an answer: whether prose is a final answer, and whether the answer is valid under the
JSON schema that the client asked for."""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_ERROR_CHARS = 500
_FENCED_ANSWER = re.compile(r"\s*```(?:json)?[ \t]*\n(?P<inside>.*?)\n?```\s*", re.DOTALL)
_ANNOUNCEMENT = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|now|next|first|then|so)\b[\s,]*)*"
    r"(?:let me|let's|let us|i'll|i will|i'm going to|i am going to|i need to)\b"
    r"(?! (?:know|be (?:happy|glad))\b)",  # "let me know if ...": the end of many answers
    re.IGNORECASE,
)
_ANNOUNCEMENT_ENDINGS = (":", "...", "\N{HORIZONTAL ELLIPSIS}")


def is_answer(text: str, finish_reason: str) -> bool:
    """Return True if the prose of a turn without tool calls is a final answer: it is complete and
    does not announce a next step."""
    lines = text.strip().splitlines()
    if not lines or finish_reason == "length":
        return False
    last = lines[-1].strip()
    return not last.endswith(_ANNOUNCEMENT_ENDINGS) and not _ANNOUNCEMENT.match(last)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have: JSON that is valid under a schema."""

    schema: dict[str, Any] | bool

    def instruction(self) -> str:
        """Return the sentence that tells the model to answer in this form."""
        if self.schema == ANY_OBJECT.schema:
            return "Answer with one JSON object and nothing else."
        return (
            "Answer with one JSON value and nothing else. It must be valid under this JSON Schema:"
            f" {json.dumps(self.schema, ensure_ascii=False)}"
        )


ANY_OBJECT = AnswerForm({"type": "object"})
ANY_JSON = AnswerForm(True)


def requested_form(
    response_format: Any, structured_outputs: Any, json_schema: Any = None
) -> AnswerForm | None:
    """Return the form that a request asks for, or None if the request asks for no form that the
    proxy can check.

    The parameters are request fields of OpenAI, vLLM and llama.cpp, in this order.
    """
    openai_format = response_format if isinstance(response_format, dict) else {}
    if openai_format.get("type") == "json_object":
        return ANY_OBJECT
    if openai_format.get("type") == "json_schema":
        schema = openai_format["json_schema"].get("schema")
        return ANY_JSON if schema is None else AnswerForm(schema)
    if isinstance(structured_outputs, dict) and structured_outputs:
        return _form_of_structured_outputs(structured_outputs)
    return ANY_JSON if json_schema == {} else _form_of_structured_outputs({"json": json_schema})


def _form_of_structured_outputs(structured_outputs: dict[str, Any]) -> AnswerForm | None:
    if structured_outputs.get("json_object"):
        return ANY_OBJECT
    schema = structured_outputs.get("json")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None  # the backend refuses this request
    if not isinstance(schema, dict) or schema_error(schema):
        return None
    return AnswerForm(schema)


def schema_error(schema: Any) -> str | None:
    """Return the error of an invalid JSON Schema, or None if the schema is valid. A reference to
    another document makes a schema invalid."""
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(schema, retriever=_refuse_reference)
    except jsonschema_rs.ValidationError as error:
        return _truncate_error(error.message)
    except ValueError as error:
        return _truncate_error(str(error))
    return None


def answer_error(form: AnswerForm, answer: str) -> str | None:
    """Return the error message for an answer that does not have the form, or None.

    Some schemas make this check run without end, so callers need a timeout.
    """
    try:
        value = json.loads(answer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return _truncate_error(f"It is not JSON: {error}.")
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(form.schema, retriever=_refuse_reference).validate(value)
    except jsonschema_rs.ValidationError as error:
        path = "".join(f"[{step!r}]" for step in error.instance_path)
        return _truncate_error(f"{path}: {error.message}" if path else error.message)
    except ValueError as error:
        return _truncate_error(str(error))
    return None


def strip_code_fence(answer: str) -> str:
    """Return the answer without the code fence that models often put around JSON."""
    fenced = _FENCED_ANSWER.fullmatch(answer)
    return fenced["inside"] if fenced else answer


def _refuse_reference(uri: str) -> NoReturn:
    raise ValueError(f"references to other documents are not followed: {uri}")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _truncate_error(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " ..."
