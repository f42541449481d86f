"""What the input, the tools and the text settings of /v1/responses must look like."""

from collections.abc import Mapping
from typing import Any

from policies.answer_form import schema_fault
from proxy.errors import BadRequestError
from proxy.wire.chat_shapes import FORMATS, GRAMMAR, input_format, part, reasoning_effort
from proxy.wire.validation import Check, anything, array, boolean, either, fields, mapping, not_among, one_of, require, text, unsupported

ROLES = ("assistant", "system", "developer", "user")
CHOSEN = (
    *("function", "custom", "shell", "code_interpreter"),
    *("local_shell", "apply_patch"),
)
"""The tools that a choice can name."""
LEFT_OUT = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
)
"""Tools that are not here, and that no request is refused for: coding agents offer them with every
one, whoever serves it."""
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
    if not isinstance(value, dict) or value.get("type") != "local":
        _container("container_auto")(value, param)
    elif value.get("skills"):
        raise unsupported(f"{param}.skills", "Skills are not available here.")


def _tool_among(checks: Mapping[str, Check]) -> Check:
    def check(value: Any, param: str) -> None:
        mapping(value, param)
        require(value, "type", f"{param}.type")
        text(value["type"], f"{param}.type")
        if value["type"] not in checks:
            raise not_among(value["type"], list(checks), f"{param}.type")
        checks[value["type"]](value, param)

    return check


def _name(value: Any, param: str) -> None:
    text(value, param)
    if not value:
        raise BadRequestError(
            f"Invalid '{param}': expected a name.", param=param, code="invalid_value"
        )


_FUNCTIONS: Mapping[str, Check] = {
    "function": _whole(
        {"name": _name, "description": text, "parameters": mapping, "strict": boolean}, "name"
    ),
    "custom": _whole({"name": _name, "description": text, "format": input_format(GRAMMAR)}, "name"),
}
_OWN: Mapping[str, Check] = {
    **_FUNCTIONS,
    "namespace": _whole(
        {
            "name": _name,
            "description": text,
            "tools": array(_tool_among(_FUNCTIONS), minimum=1),
        },
        *("name", "description", "tools"),
    ),
    "tool_search": fields(
        {"execution": one_of("server", "client"), "description": text, "parameters": mapping}
    ),
    "local_shell": mapping,
    "apply_patch": mapping,
}
_LEFT_OUT: Mapping[str, Check] = dict.fromkeys(LEFT_OUT, anything)
_TOOLS: Mapping[str, Check] = {
    **_OWN,
    "shell": fields({"environment": _environment}),
    "code_interpreter": _whole(
        {
            "container": either(
                "a string or an object", str, dict, checks={dict: _container("auto")}
            )
        },
        "container",
    ),
    **_LEFT_OUT,
}
tool = _tool_among(_TOOLS)
"""An entry of `tools`."""
_brought = _tool_among({**_OWN, **_LEFT_OUT})
"""One that an item of the input brings."""


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


def _local_output(value: Any, param: str) -> None:
    _whole({**_CALL_ID, "id": text, "output": text}, "output")(value, param)
    if value.get("call_id") is None:  # then its own id is the call's
        require(value, "id", f"{param}.call_id")
        text(value["id"], f"{param}.id")


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
    "tool_search_call": fields({"call_id": text}, required=["arguments"]),
    "tool_search_output": _whole({"call_id": text, "tools": array(_brought)}, "tools"),
    "additional_tools": _whole(
        {"role": one_of("developer"), "tools": array(_brought)}, "role", "tools"
    ),
    "shell_call": _whole(
        {**_CALL_ID, "action": mapping, "environment": mapping}, "call_id", "action"
    ),
    "shell_call_output": _whole({**_CALL_ID, "output": array(mapping)}, "call_id", "output"),
    "local_shell_call": _whole({**_CALL_ID, "action": mapping}, "call_id", "action"),
    "local_shell_call_output": _local_output,
    "apply_patch_call": _whole({**_CALL_ID, "operation": mapping}, "call_id", "operation"),
    "apply_patch_call_output": _whole(
        {**_CALL_ID, "status": text, "output": text}, "call_id", "status"
    ),
    "item_reference": _whole({"id": text}, "id"),
}
"""Those that are looked at."""
PASSED_OVER = frozenset(
    {
        *("reasoning", "code_interpreter_call"),
        *("web_search_call", "file_search_call", "computer_call"),
        *("computer_call_output", "image_generation_call", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "additional_tools"),
        *("program", "program_output"),
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
    if kind in ITEMS:
        ITEMS[kind](value, param)
    elif kind not in PASSED_OVER:
        raise not_among(kind, sorted({*ITEMS, *PASSED_OVER}), f"{param}.type")


tool_choice = either(
    "a string or an object",
    str,
    dict,
    checks={
        str: one_of("none", "auto", "required"),
        dict: _whole(
            {
                "type": one_of(*CHOSEN, "allowed_tools"),
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
