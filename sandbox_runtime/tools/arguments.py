"""Whether a tool call's arguments fit the tool's schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from sandbox_runtime.tools.base import Mistake, ToolSchema

_MAX_ARRAY_CHARS = 100
"""Beyond what any range needs, and too few to nest deeper than the parser can."""
_DIGITS = re.compile(r"\s*-?\d{1,18}\s*", re.ASCII)


def checked(schema: ToolSchema, arguments: object) -> dict[str, Any]:
    """The arguments in the types the schema asks for; a null is as good as absent.

    Raises Mistake. What can only be meant in one way is accepted: "3" for 3, "[1, 5]" for [1, 5].
    """
    properties = schema["function"]["parameters"]["properties"]
    given = {} if arguments is None else arguments
    if not isinstance(given, Mapping):
        raise Mistake(_complaint(schema, [f"they are {_kind(given)}, not an object"]))
    present = {name: value for name, value in given.items() if value is not None}
    required = schema["function"]["parameters"].get("required", [])
    problems = [f"{str(name)[:80]!r} is unknown" for name in present if name not in properties]
    problems += [f"{name!r} is missing" for name in required if name not in present]
    fitted: dict[str, Any] = {}
    for name in properties:
        if name in present:
            try:
                fitted[name] = _fitted(properties[name], present[name])
            except ValueError as error:
                problems.append(f"{name!r} {error}")
    if problems:
        raise Mistake(_complaint(schema, problems))
    return fitted


def typed(schema: ToolSchema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that the schema knows, in its types: one may be missing, and of an enum any
    word will do. Raises Mistake."""
    function = schema["function"]
    properties = {
        name: {key: value for key, value in declared.items() if key != "enum"}
        for name, declared in function["parameters"]["properties"].items()
    }
    lenient = {"function": {"name": function["name"], "parameters": {"properties": properties}}}
    return checked(lenient, {name: arguments[name] for name in properties if name in arguments})


def expected_shape(schema: ToolSchema) -> str:
    """The arguments a tool takes, in one line for the model."""
    parameters = schema["function"]["parameters"]
    required = parameters.get("required", [])
    fields = [
        f'"{name}": <{_type_words(declared)}{"" if name in required else ", optional"}>'
        for name, declared in parameters["properties"].items()
    ]
    return "{" + ", ".join(fields) + "}"


def _complaint(schema: ToolSchema, problems: list[str]) -> str:
    name = schema["function"]["name"]
    return (
        f"Nothing was done: the arguments of {name} are wrong: {'; '.join(problems)}."
        f" Expected {expected_shape(schema)}."
    )


def _type_words(declared: Mapping[str, Any]) -> str:
    if "enum" in declared:
        return " | ".join(declared["enum"])
    if declared["type"] == "array":
        return f"array of {declared['items']['type']}s"
    return str(declared["type"])


def _fitted(declared: Mapping[str, Any], value: object) -> object:
    """Raises ValueError whose text continues "'name' …"."""
    if declared["type"] == "integer":
        return _integer(value)
    if declared["type"] == "array":
        return _integers(value)
    return _string(declared, value)


def _string(declared: Mapping[str, Any], value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {_kind(value)}")
    if "enum" in declared and value not in declared["enum"]:
        raise ValueError(f"must be one of {', '.join(declared['enum'])}, not {value[:80]!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return value


def _integer(value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, not {_kind(value)}")
    return value


def _integers(value: object) -> list[int]:
    if isinstance(value, str):
        try:
            value = json.loads(value[:_MAX_ARRAY_CHARS])
        except ValueError:
            raise ValueError("must be an array of integers, not a string") from None
    if not isinstance(value, list):
        raise ValueError(f"must be an array of integers, not {_kind(value)}")
    return [_integer(item) for item in value]


def _kind(value: object) -> str:
    """A value's type as JSON calls it."""
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
