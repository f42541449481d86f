"""The Tool interface, the Observation that a call returns, and the parsing of a call's arguments.

Open this module to add a tool, or when a model's arguments are refused or accepted wrongly.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sandbox_runtime.sandbox import Lease, OnOutput

ToolSchema = dict[str, Any]
"""An entry of `tools` in a chat-completions request."""
_MAX_ARRAY_CHARS = 100
"""Maximum length of an array that is given as a string: more than any range needs, and too few
characters to exceed the parser's nesting limit."""
_DIGITS = re.compile(r"\s*-?\d{1,18}\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a tool call: the text for the model, and figures for the agent loop."""

    text: str
    exit_code: int | None = None
    """The command's exit code; None if no command has ended."""
    timed_out: bool = False
    """True if the command was ended at its timeout."""
    output_lines: int | None = None
    """Number of lines that the command wrote; None if no command ran."""
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    finished: bool = False
    """True if the model has ended the run (submit only)."""
    answer: str | None = None
    """The final answer, if the model gave one to submit."""


class ToolInputError(Exception):
    """The model's call is invalid; the text says how to correct it.

    Each tool turns the error into an Observation.
    """


class Tool(Protocol):
    """A tool that the model can call."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""

    @property
    def schema(self) -> ToolSchema:
        """The tool's entry in `tools` of the request to the model."""

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        """Run the tool and return the observation, also when the model called the tool wrongly.

        `arguments` is what the model wrote, parsed from JSON and not yet checked. The sandbox is
        leased only once the arguments are valid. Raises only NoFreeSandboxError, SandboxStartError
        and SandboxLostError.
        """


def parse_arguments(schema: ToolSchema, arguments: object) -> dict[str, Any]:
    """Return the arguments in the types of the schema; a null counts as absent.

    A value of another type is accepted if its meaning is unambiguous, such as "3" for 3 and
    "[1, 5]" for [1, 5]. Raises ToolInputError, which names all problems at once.
    """
    properties = schema["function"]["parameters"]["properties"]
    fields = {} if arguments is None else arguments
    if not isinstance(fields, Mapping):
        raise ToolInputError(
            _wrong_arguments_text(schema, [f"they are {_json_type(fields)}, not an object"])
        )
    present = {name: value for name, value in fields.items() if value is not None}
    required = schema["function"]["parameters"].get("required", [])
    problems = [f"{str(name)[:80]!r} is unknown" for name in present if name not in properties]
    problems += [f"{name!r} is missing" for name in required if name not in present]
    fitted: dict[str, Any] = {}
    for name in properties:
        if name in present:
            try:
                fitted[name] = _convert(properties[name], present[name])
            except ValueError as error:
                problems.append(f"{name!r} {error}")
    if problems:
        raise ToolInputError(_wrong_arguments_text(schema, problems))
    return fitted


def parse_known_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the schema declares, converted to the declared types, and ignore
    all others.

    Unlike `parse_arguments`, this function accepts any string for an enum, and required arguments
    may be missing. Raises ToolInputError if a value cannot be converted.
    """
    function = schema["function"]
    properties = {
        name: {key: value for key, value in declared.items() if key != "enum"}
        for name, declared in function["parameters"]["properties"].items()
    }
    lenient = {"function": {"name": function["name"], "parameters": {"properties": properties}}}
    return parse_arguments(
        lenient, {name: arguments[name] for name in properties if name in arguments}
    )


def expected_shape(schema: ToolSchema) -> str:
    """Describe the arguments that a tool takes, in one line for the model."""
    parameters = schema["function"]["parameters"]
    required = parameters.get("required", [])
    fields = [
        f'"{name}": <{_type_words(declared)}{"" if name in required else ", optional"}>'
        for name, declared in parameters["properties"].items()
    ]
    return "{" + ", ".join(fields) + "}"


def _wrong_arguments_text(schema: ToolSchema, problems: list[str]) -> str:
    name = schema["function"]["name"]
    return (
        f"Nothing was done: the arguments of {name} are wrong: {'; '.join(problems)}."
        f" Expected {expected_shape(schema)}."
    )


def _type_words(property_schema: Mapping[str, Any]) -> str:
    if "enum" in property_schema:
        return " | ".join(property_schema["enum"])
    if property_schema["type"] == "array":
        return f"array of {property_schema['items']['type']}s"
    return str(property_schema["type"])


def _convert(property_schema: Mapping[str, Any], value: object) -> object:
    """Convert a value to the declared type. Raises ValueError, whose text continues a sentence that
    begins with the argument's name."""
    if property_schema["type"] == "integer":
        return _to_integer(value)
    if property_schema["type"] == "array":
        return _to_integers(value)
    return _to_string(property_schema, value)


def _to_string(property_schema: Mapping[str, Any], value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {_json_type(value)}")
    if "enum" in property_schema and value not in property_schema["enum"]:
        raise ValueError(f"must be one of {', '.join(property_schema['enum'])}, not {value[:80]!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return value


def _to_integer(value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, not {_json_type(value)}")
    return value


def _to_integers(value: object) -> list[int]:
    if isinstance(value, str):
        try:
            value = json.loads(value[:_MAX_ARRAY_CHARS])
        except ValueError:
            raise ValueError("must be an array of integers, not a string") from None
    if not isinstance(value, list):
        raise ValueError(f"must be an array of integers, not {_json_type(value)}")
    return [_to_integer(item) for item in value]


def _json_type(value: object) -> str:
    """Return the name of a value's type in JSON."""
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
