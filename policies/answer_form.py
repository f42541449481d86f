"""The form that a client asked the answer to have, and what an answer lacks of it."""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_FAULT_CHARS = 500
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(?P<inside>.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """JSON that is valid under a schema."""

    schema: dict[str, Any] | bool

    def words(self) -> str:
        """How the model is told of it."""
        if self.schema == ANY_OBJECT.schema:
            return "Answer with one JSON object and nothing else."
        shown = json.dumps(self.schema, ensure_ascii=False)
        return (
            "Answer with one JSON value and nothing else. It must be valid under this JSON Schema:"
            f" {shown}"
        )


ANY_OBJECT = AnswerForm({"type": "object"})
ANY_JSON = AnswerForm(True)


def form_of(
    response_format: Any, structured_outputs: Any, json_schema: Any = None
) -> AnswerForm | None:
    """What can be checked of the form that was asked for, in OpenAI's words, in vLLM's, or in
    llama.cpp's (`json_schema` beside the other fields)."""
    asked = response_format if isinstance(response_format, dict) else {}
    if asked.get("type") == "json_object":
        return ANY_OBJECT
    if asked.get("type") == "json_schema":
        schema = asked["json_schema"].get("schema")
        return ANY_JSON if schema is None else AnswerForm(schema)
    if isinstance(structured_outputs, dict) and structured_outputs:
        return _structured(structured_outputs)
    return ANY_JSON if json_schema == {} else _structured({"json": json_schema})


def _structured(asked: dict[str, Any]) -> AnswerForm | None:
    if asked.get("json_object"):
        return ANY_OBJECT
    schema = asked.get("json")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None  # the backend's to refuse
    if not isinstance(schema, dict) or schema_fault(schema):
        return None
    return AnswerForm(schema)


def schema_fault(schema: Any) -> str | None:
    """What is wrong with a schema; it is not followed to other documents."""
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(schema, retriever=_not_followed)
    except jsonschema_rs.ValidationError as error:
        return _short(error.message)
    except ValueError as error:
        return _short(str(error))
    return None


def answer_fault(form: AnswerForm, answer: str) -> str | None:
    """What an answer lacks. A schema can make this endless: it wants a bound in time."""
    try:
        value = json.loads(answer, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        return _short(f"It is not JSON: {error}.")
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(form.schema, retriever=_not_followed).validate(value)
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"[{step!r}]" for step in error.instance_path)
        return _short(f"{place}: {error.message}" if place else error.message)
    except ValueError as error:
        return _short(str(error))
    return None


def unfenced(answer: str) -> str:
    """The answer without the code fence that models like to put around JSON."""
    fenced = _FENCED.fullmatch(answer)
    return fenced["inside"] if fenced else answer


def _not_followed(uri: str) -> NoReturn:
    raise ValueError(f"references to other documents are not followed: {uri}")


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _short(text: str) -> str:
    return text if len(text) <= MAX_FAULT_CHARS else text[:MAX_FAULT_CHARS] + " ..."
