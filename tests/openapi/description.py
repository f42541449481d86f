"""OpenAI's own description of its API, amended and reduced to what this server serves."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.openapi.amendments import AMENDMENTS

Tree = dict[str, Any]

_ROOT = Path(__file__).parent.parent.parent
PLACE = Path(os.environ.get("OPENAI_DESCRIPTION", _ROOT.parent / "shared" / "openai-openapi.json"))
"""Path of the description; the project has no copy of it."""
described = pytest.mark.skipif(
    not PLACE.exists() and "OPENAI_DESCRIPTION" not in os.environ,
    reason=f"{PLACE.name}, OpenAI's own description, is not there: name it by OPENAI_DESCRIPTION",
)
"""Skips tests that need the description if it is missing."""
BASE_PATH = "/v1"
REFUSALS = ("400", "401", "404", "405", "413", "415")
"""Statuses of client errors, few of which the description lists."""
_REFUSED: Tree = {
    "description": "refused",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
}
_EVENTS = "text/event-stream"
_STREAM: Tree = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
_PARAMETER = re.compile(r"\{[^}]*\}")


def field_names(name: str) -> set[str]:
    """Return the fields of a schema, including those of its parts."""
    return set(_field_names(_read(), {"$ref": f"#/components/schemas/{name}"}))


def check(name: str, value: Any) -> None:
    """Validate a value against a schema of the unamended description; raise if it is invalid."""
    _validator(name).validate(value)


@cache
def _validator(name: str) -> jsonschema_rs.Validator:
    tree = _read()
    for schema in _schemas(tree):
        _mend(schema)
    components = {"components": tree["components"]}
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", **components})


def _field_names(tree: Tree, schema: Tree) -> Iterator[str]:
    if "$ref" in schema:
        schema = _found(tree, schema["$ref"].removeprefix("#/"))
    yield from schema.get("properties", {})
    for part in schema.get("allOf", []):
        yield from _field_names(tree, part)


def _read() -> Tree:
    tree: Tree = json.loads(PLACE.read_text(encoding="utf-8"))
    return tree


def amended() -> Tree:
    """Return the amended description."""
    tree = _read()
    for amendment in AMENDMENTS:
        _amend(_found(tree, amendment.at), amendment.change)
    for schema in _schemas(tree):
        _mend(schema)
    for schema in _of_requests_alone(tree):
        _let_null_be_none(schema)
    for operation in _operations(tree):
        for response in operation["responses"].values():
            if stream := response.get("content", {}).get(_EVENTS):
                stream["schema"] = _event_of(stream["schema"])
    return tree


def cut(description: Tree, endpoints: Collection[str]) -> Tree:
    """Return the description of these endpoints (`METHOD /path`), with all error statuses added."""
    served = {_unnamed(endpoint) for endpoint in endpoints}
    paths = {
        path: {
            method: operation
            | {"responses": operation["responses"] | dict.fromkeys(REFUSALS, _REFUSED)}
            for method, operation in operations.items()
            if _unnamed(f"{method.upper()} {BASE_PATH}{path}") in served
        }
        for path, operations in description["paths"].items()
    }
    return {**description, "paths": paths}


def streamed(description: Tree) -> Tree:
    """Return the description of the endpoints that can stream, with `stream` set in the request."""
    paths = {
        path: {
            method: _streamed(operation)
            for method, operation in operations.items()
            if "requestBody" in operation and _EVENTS in _content(operation)
        }
        for path, operations in description["paths"].items()
    }
    return {**description, "paths": paths}


def answer_schema(description: Tree, method: str, path: str) -> Tree:
    """Return the schema of a successful JSON answer, or one that accepts anything."""
    content = _content(description["paths"][path][method])
    schema = content.get("application/json", {}).get("schema", {})
    return {**schema, "components": description["components"]}


def _content(operation: Tree) -> Tree:
    """Return the content types of a successful answer."""
    found: Tree = operation["responses"]["200"].get("content", {})
    return found


def _streamed(operation: Tree) -> Tree:
    body = operation["requestBody"]
    request_content = {
        "schema": {"allOf": [body["content"]["application/json"]["schema"], _STREAM]}
    }
    success = {"description": "streamed", "content": {_EVENTS: _content(operation)[_EVENTS]}}
    return {
        **operation,
        "requestBody": {**body, "content": {"application/json": request_content}},
        "responses": {**operation["responses"], "200": success},
    }


def _unnamed(endpoint: str) -> str:
    return _PARAMETER.sub("{}", endpoint)


def _found(tree: Tree, at: str) -> Tree:
    place: Any = tree
    for step in at.split("/"):
        name, _, value = step.partition("=")
        if value:
            place = next(each for each in place if each[name] == value)
        elif isinstance(place, list):
            place = place[int(step)]
        else:
            place = place[step.replace("~", "/")]
    assert isinstance(place, dict)
    return place


def _amend(place: Tree, change: Mapping[str, Any]) -> None:
    for name, value in change.items():
        if value is None:
            del place[name]
        else:
            place[name] = value


def _or_null(schema: Tree) -> Tree:
    return {"anyOf": [schema, {"type": "null"}]}


def _mend(schema: Tree) -> None:
    """Replace schema keywords that JSON Schema does not allow or define."""
    if isinstance(schema.get("required"), list):  # some lists contain duplicates
        schema["required"] = list(dict.fromkeys(schema["required"]))
    if schema.get("nullable") is True:  # from an older OpenAPI version
        del schema["nullable"]
        one = dict(schema)
        schema.clear()
        schema |= _or_null(one)


def _let_null_be_none(schema: Tree) -> None:
    """Allow null for optional fields, as the description does in most places."""
    fields = schema.get("properties", {})
    for name in fields:
        if name not in schema.get("required", []):
            fields[name] = _or_null(fields[name])


def _of_requests_alone(tree: Tree) -> list[Tree]:
    """Return the schemas that only requests use."""
    bodies = [each.get("requestBody", {}).get("content", {}) for each in _operations(tree)]
    sent = _reached(tree, [body.get("application/json") for body in bodies])
    answered = _reached(tree, [each["responses"] for each in _operations(tree)])
    return [schema for id, schema in sent.items() if id not in answered]


def _operations(tree: Tree) -> list[Tree]:
    return [operation for path in tree["paths"].values() for operation in path.values()]


def _event_of(schema: Tree) -> Tree:
    """Return the schema of a server-sent event with this data, or with an error."""
    event_data = {"anyOf": [schema, {"$ref": "#/components/schemas/ErrorResponse"}]}
    content = {"contentMediaType": "application/json", "contentSchema": event_data}
    data = {"if": {"const": "[DONE]"}, "else": content}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _reached(tree: Tree, places: Any) -> dict[int, Tree]:
    """Return all schemas that are reachable from these nodes, following references, by identity."""
    found: dict[int, Tree] = {}
    waiting = list(_schemas(places))
    while waiting:
        schema = waiting.pop()
        if id(schema) in found:
            continue
        found[id(schema)] = schema
        target = schema.get("$ref")
        if isinstance(target, str):
            waiting += _schemas(_found(tree, target.removeprefix("#/")))
    return found


def _schemas(tree: Any) -> Iterator[Tree]:
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from _schemas(each)
