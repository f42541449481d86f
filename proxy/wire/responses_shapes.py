"""What the input, the tools and the text settings of /v1/responses must look like."""

from collections.abc import Mapping
from typing import Any

from policies.answer_form import schema_fault
from proxy.errors import BadRequestError
from proxy.wire.chat_shapes import FORMATS, part, reasoning_effort
from proxy.wire.shapes import (
    Check,
    array,
    boolean,
    either,
    fields,
    mapping,
    not_among,
    one_of,
    require,
    text,
)

ROLES = ("assistant", "system", "developer", "user")
TOOLS = ("function", "custom", "shell", "code_interpreter")
"""Those that there are here."""
MEMORY_LIMITS = ("1g", "4g", "16g", "64g")


def _whole(known: Mapping[str, Check], *required: str) -> Check:
    """An object in which null is no value for what must be there."""
    check = fields(known, required=required)

    def whole(value: Any, param: str) -> None:
        check(value, param)
        for name in required:
            if value[name] is None:
                known[name](None, f"{param}.{name}")

    return whole


_PARTS: Mapping[str, Check] = {
    "input_text": _whole({"text": text}, "text"),
    "input_image": fields({"image_url": text, "file_id": text, "detail": text}),
    "input_file": fields({"file_data": text, "file_id": text, "file_url": text, "filename": text}),
    "output_text": _whole({"text": text}, "text"),
}


def _part(value: Any, param: str) -> None:
    mapping(value, param)
    require(value, "type", f"{param}.type")
    text(value["type"], f"{param}.type")
    _PARTS.get(value["type"], part)(value, param)


_CONTENT = either("a string or array of objects", str, list, checks={list: array(_part)})
_CALL_ID: Mapping[str, Check] = {"call_id": text}
ITEMS: Mapping[str, Check] = {
    "message": _whole({"role": one_of(*ROLES), "content": _CONTENT}, "role", "content"),
    "function_call": _whole(
        {**_CALL_ID, "name": text, "arguments": text}, "call_id", "name", "arguments"
    ),
    "function_call_output": _whole({**_CALL_ID, "output": _CONTENT}, "call_id", "output"),
    "custom_tool_call": _whole(
        {**_CALL_ID, "name": text, "input": text}, "call_id", "name", "input"
    ),
    "custom_tool_call_output": _whole({**_CALL_ID, "output": _CONTENT}, "call_id", "output"),
    "item_reference": _whole({"id": text}, "id"),
}
"""Those that say something to the model."""
PASSED_OVER = frozenset(
    {
        *("reasoning", "shell_call", "shell_call_output", "code_interpreter_call"),
        *("local_shell_call", "local_shell_call_output", "apply_patch_call"),
        *("apply_patch_call_output", "web_search_call", "file_search_call", "computer_call"),
        *("computer_call_output", "image_generation_call", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "tool_search_call"),
        *("tool_search_output", "additional_tools", "program", "program_output"),
        *("compaction", "compaction_trigger"),
    }
)
"""What hosted tools and thinking have left: no model is told of it again."""


def item_type(item: Mapping[str, Any]) -> str:
    """What an item is; messages and references may leave it out."""
    if item.get("type") is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return str(item["type"])


def item(value: Any, param: str) -> None:
    """One item of the input."""
    mapping(value, param)
    if value.get("id") is not None:
        text(value["id"], f"{param}.id")
    kind = item_type(value)
    if kind in PASSED_OVER:
        return
    if kind not in ITEMS:
        raise not_among(kind, sorted({*ITEMS, *PASSED_OVER}), f"{param}.type")
    ITEMS[kind](value, param)


def _container(kind: str) -> Check:
    described = _whole(
        {
            "type": text,
            "file_ids": array(text),
            "memory_limit": one_of(*MEMORY_LIMITS),
            "network_policy": _whole({"type": one_of("disabled", "allowlist")}, "type"),
            "container_id": text,
        },
        "type",
    )

    def check(value: Any, param: str) -> None:
        described(value, param)
        if value.get("skills"):
            raise unsupported(f"{param}.skills", "Skills are not available here.")
        one_of(kind, "container_reference")(value["type"], f"{param}.type")
        if value["type"] == "container_reference":
            require(value, "container_id", f"{param}.container_id")
            text(value["container_id"], f"{param}.container_id")

    return check


def _environment(value: Any, param: str) -> None:
    if isinstance(value, dict) and value.get("type") == "local":
        raise unsupported(
            f"{param}.type",
            "Commands are run here, in a sandbox, and not by the client: name 'container_auto',"
            " or give the model a function of your own.",
        )
    _container("container_auto")(value, param)


def _custom_format(value: Any, param: str) -> None:
    mapping(value, param)
    if value.get("type") == "grammar":
        raise unsupported(f"{param}.type", "No grammar can be held to here: use 'text'.")
    one_of("text")(value.get("type", "text"), f"{param}.type")


_TOOLS: Mapping[str, Check] = {
    "function": _whole(
        {"name": text, "description": text, "parameters": mapping, "strict": boolean}, "name"
    ),
    "custom": _whole({"name": text, "description": text, "format": _custom_format}, "name"),
    "shell": fields({"environment": _environment}),
    "code_interpreter": _whole(
        {
            "container": either(
                "a string or an object", str, dict, checks={dict: _container("auto")}
            )
        },
        "container",
    ),
}


def tool(value: Any, param: str) -> None:
    """An entry of `tools`."""
    mapping(value, param)
    require(value, "type", f"{param}.type")
    text(value["type"], f"{param}.type")
    if value["type"] not in _TOOLS:
        raise not_among(value["type"], TOOLS, f"{param}.type")
    _TOOLS[value["type"]](value, param)
    if value.get("name") == "":
        raise BadRequestError(
            f"Invalid '{param}.name': expected a name.", param=f"{param}.name", code="invalid_value"
        )


tool_choice = either(
    "a string or an object",
    str,
    dict,
    checks={
        str: one_of("none", "auto", "required"),
        dict: _whole(
            {
                "type": one_of(*TOOLS, "allowed_tools"),
                "name": text,
                "mode": one_of("auto", "required"),
                "tools": array(mapping),
            },
            "type",
        ),
    },
)


def _text_format(value: Any, param: str) -> None:
    mapping(value, param)
    require(value, "type", f"{param}.type")
    one_of(*FORMATS)(value["type"], f"{param}.type")
    if value["type"] != "json_schema":
        return
    _NAMED_SCHEMA(value, param)
    if fault := schema_fault(value["schema"]):
        raise BadRequestError(
            f"Invalid schema for {param} '{value['name']}': {fault}", param=f"{param}.schema"
        )


_NAMED_SCHEMA = _whole(
    {"name": text, "description": text, "schema": mapping, "strict": boolean}, "name", "schema"
)
text_settings = fields({"format": _text_format, "verbosity": one_of("low", "medium", "high")})
_SUMMARY = one_of("auto", "concise", "detailed")
reasoning = fields(
    {
        "effort": reasoning_effort,
        "summary": _SUMMARY,
        "generate_summary": _SUMMARY,
        "context": text,
        "mode": text,
    }
)


def refused(words: str) -> Check:
    """A field that nothing here can do."""

    def check(value: Any, param: str) -> None:
        raise unsupported(param, words)

    return check


def unsupported(param: str, words: str) -> BadRequestError:
    """The error for what OpenAI has and this server has not."""
    return BadRequestError(
        f"Unsupported parameter: '{param}'. {words}", param=param, code="unsupported_parameter"
    )
