"""What messages, tools and answer formats must look like: where backends take more, so do we."""

from typing import Any

from policies.answer_form import schema_fault
from proxy.errors import BadRequestError
from proxy.wire.validation import Check, anything, array, boolean, either, fields, mapping, number, one_of, require, text

FORMATS = ("json_object", "json_schema", "text")
EXTRA_FORMATS = ("structural_tag",)
"""vLLM's and SGLang's; the backend checks it."""

_URL = either("a string or an object", str, dict, checks={dict: fields({"url": text})})
text_part = fields({"type": one_of("text"), "text": text}, required=["type", "text"])
_PARTS: dict[str, Check] = {
    "text": text_part,
    "image_url": fields({"image_url": _URL}, required=["image_url"]),
    "input_audio": fields(
        {"input_audio": fields({"data": text, "format": text}, required=["data"])},
        required=["input_audio"],
    ),
    "file": fields(
        {"file": fields({"file_data": text, "file_id": text, "filename": text})},
        required=["file"],
    ),
    "refusal": fields({"refusal": text}, required=["refusal"]),
}
"""Those that OpenAI has; a part of any other type is carried."""


def part(value: Any, param: str) -> None:
    """One part of a message's content; vLLM takes bare strings, and parts without a type."""
    if isinstance(value, str):
        return
    mapping(value, param)
    kind = value.get("type")
    if kind is not None:
        text(kind, f"{param}.type")
        _PARTS.get(kind, anything)(value, param)


_CONTENT = either("a string or array of objects", str, list, checks={list: array(part)})
_CALL = fields(
    {
        "id": text,
        "function": fields({"name": text, "arguments": either("a string or an object", str, dict)}),
        "custom": fields({"name": text, "input": text}, required=["name", "input"]),
    }
)
message = fields(
    {
        "role": text,
        "content": _CONTENT,
        "name": text,
        "tool_call_id": text,
        "tool_calls": array(_CALL),
        "function_call": fields({"name": text, "arguments": text}, required=["name"]),
        "refusal": text,
    },
    required=["role"],
)
"""One message. Roles are the chat template's matter: any word will do."""
_FUNCTION = fields(
    {"name": text, "description": text, "parameters": mapping, "strict": boolean},
    required=["name"],
)


def function(value: Any, param: str) -> None:
    """A function as the client describes it."""
    _FUNCTION(value, param)
    _has_name(value, param)


GRAMMAR = fields(
    {"syntax": one_of("lark", "regex"), "definition": text}, required=["syntax", "definition"]
)


def input_format(grammar: Check) -> Check:
    """What a custom tool is given: any text, or what a grammar says."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        one_of("text", "grammar")(value.get("type", "text"), f"{param}.type")
        if value.get("type") == "grammar":
            grammar(value, param)

    return check


def tool(value: Any, param: str) -> None:
    """An entry of `tools`."""
    mapping(value, param)
    if value.get("type") == "custom":
        _CUSTOM_TOOL(value, param)
        _has_name(value["custom"], f"{param}.custom")
        return
    if "function" not in value and value.get("type") is not None:
        one_of("function", "custom")(value["type"], f"{param}.type")
    _TOOL(value, param)
    function(value["function"], f"{param}.function")


def _has_name(value: Any, param: str) -> None:
    if not value["name"]:
        raise BadRequestError(
            f"Invalid '{param}.name': expected a name.", param=f"{param}.name", code="invalid_value"
        )


_TOOL = fields({"type": text, "function": mapping}, required=["function"])
_NESTED_GRAMMAR = fields({"grammar": GRAMMAR}, required=["grammar"])
_CUSTOM_TOOL = fields(
    {
        "custom": fields(
            {"name": text, "description": text, "format": input_format(_NESTED_GRAMMAR)},
            required=["name"],
        )
    },
    required=["custom"],
)
_NAMED = fields({"name": text}, required=["name"])
_ALLOWED = fields(
    {"mode": one_of("auto", "required"), "tools": array(mapping)}, required=["mode", "tools"]
)
_CHOICES: dict[str, Check] = {
    "function": fields({"function": _NAMED}, required=["function"]),
    "custom": fields({"custom": _NAMED}, required=["custom"]),
    "allowed_tools": fields({"allowed_tools": _ALLOWED}, required=["allowed_tools"]),
}


def _choice(value: Any, param: str) -> None:
    """A tool, or some of them; vLLM takes a function without a type."""
    kind = "function" if value.get("type") is None else value["type"]
    one_of(*_CHOICES)(kind, f"{param}.type")
    _CHOICES[kind](value, param)


tool_choice = either(
    "a string or an object",
    str,
    dict,
    checks={str: one_of("none", "auto", "required"), dict: _choice},
)
function_call = either(
    "a string or an object",
    str,
    dict,
    checks={str: one_of("none", "auto"), dict: _NAMED},
)
stop = either("a string or array of strings", str, list, checks={list: array(text)})
reasoning_effort = either(
    "a string or a decimal",
    str,
    float,
    int,
    checks={
        str: one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        float: number(0, 1),
        int: number(0, 1),
    },
)
"""SGLang takes a number too."""
_NAMED_SCHEMA = fields(
    {"name": text, "description": text, "schema": mapping, "strict": boolean}, required=["name"]
)


def response_format(value: Any, param: str) -> None:
    """The form of the answer, its JSON Schema included."""
    mapping(value, param)
    require(value, "type", f"{param}.type")
    one_of(*FORMATS, *EXTRA_FORMATS)(value["type"], f"{param}.type")
    if value["type"] != "json_schema":
        return
    require(value, "json_schema", f"{param}.json_schema")
    named = value["json_schema"]
    _NAMED_SCHEMA(named, f"{param}.json_schema")
    schema = named.get("schema")
    if schema is not None and (fault := schema_fault(schema)):
        raise BadRequestError(f"Invalid schema for {param} '{named['name']}': {fault}", param=param)
