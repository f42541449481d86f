"""Checks of the fields of POST /v1/responses, its input items and its tools."""

from collections.abc import Mapping
from typing import Any

from proxy.schemas.chat_parameters import (
    FUNCTION,
    GRAMMAR,
    OPENAI,
    check_content_part,
    check_json_schema,
    check_tool_name,
    custom_tool,
    reasoning_effort,
)
from proxy.schemas.validation import (
    MAX_MESSAGES,
    Check,
    accept_anything,
    array,
    check_boolean,
    check_mapping,
    check_text,
    discriminated,
    integer,
    object_with,
    one_of,
    require_field,
    text_or_object,
    text_or_parts,
    union,
    unsupported_error,
    unsupported_value_error,
)

_ROLES = ("assistant", "system", "developer", "user")
_CHOICE_TYPES = (
    *("function", "custom", "shell", "code_interpreter"),
    *("local_shell", "apply_patch"),
)
"""The types of tools that `tool_choice` can name."""
UNAVAILABLE_TOOL_TYPES = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
)
"""Types of tools that are accepted but not available. Coding agents send them with every
request."""


def _refusing_check(hint: str) -> Check:
    """Return a check that refuses every value, with `hint` in the error message."""

    def check(value: Any, param: str) -> None:
        raise unsupported_error(param, hint)

    return check


def _check_no_skills(value: Any, param: str) -> None:
    if value:
        raise unsupported_error(param, "Skills are not available here.")


_NO_SKILLS: Mapping[str, Check] = {"skills": _check_no_skills}
_CONTAINER: Mapping[str, Check] = {
    **_NO_SKILLS,
    "file_ids": array(check_text),
    "memory_limit": one_of("1g", "4g", "16g", "64g"),
    "network_policy": object_with({"type": one_of("disabled", "allowlist")}),
    "container_id": check_text,
}
_NEW_CONTAINER = object_with(optional=_CONTAINER)
_CONTAINER_REFERENCE = object_with({"container_id": check_text}, _CONTAINER)
_ENVIRONMENT = discriminated(
    {
        "container_auto": _NEW_CONTAINER,
        "container_reference": _CONTAINER_REFERENCE,
        "local": object_with(optional=_NO_SKILLS),
    }
)
_CODE_CONTAINER = discriminated(
    {"auto": _NEW_CONTAINER, "container_reference": _CONTAINER_REFERENCE}
)
_FUNCTIONS: Mapping[str, Check] = {"function": FUNCTION, "custom": custom_tool(GRAMMAR)}
_CLIENT_TOOLS: Mapping[str, Check] = {
    **_FUNCTIONS,
    "namespace": object_with(
        {
            "name": check_tool_name,
            "description": check_text,
            "tools": array(discriminated(_FUNCTIONS), minimum=1),
        }
    ),
    "tool_search": object_with(
        optional={
            "execution": one_of("server", "client"),
            "description": check_text,
            "parameters": check_mapping,
        }
    ),
    "local_shell": check_mapping,
    "apply_patch": check_mapping,
}
_UNAVAILABLE_TOOLS: Mapping[str, Check] = dict.fromkeys(UNAVAILABLE_TOOL_TYPES, accept_anything)
_TOOLS: Mapping[str, Check] = {
    **_CLIENT_TOOLS,
    "shell": object_with(optional={"environment": _ENVIRONMENT}),
    "code_interpreter": object_with({"container": text_or_object(_CODE_CONTAINER)}),
    **_UNAVAILABLE_TOOLS,
}
_LOADED_TOOLS = array(discriminated({**_CLIENT_TOOLS, **_UNAVAILABLE_TOOLS}))
"""The check of the tools in an input item."""
_PART_CHECKS: Mapping[str, Check] = {
    "input_text": object_with({"text": check_text}),
    "input_image": object_with(
        optional={"image_url": check_text, "file_id": check_text, "detail": check_text}
    ),
    "input_file": object_with(
        optional={
            "file_data": check_text,
            "file_id": check_text,
            "file_url": check_text,
            "filename": check_text,
        }
    ),
    "output_text": object_with({"text": check_text}),
}
_CONTENT = text_or_parts(discriminated(_PART_CHECKS, check_other=check_content_part))
_CALL_ID: Mapping[str, Check] = {"call_id": check_text}


def _check_local_shell_output(value: Any, param: str) -> None:
    object_with({"output": check_text}, {**_CALL_ID, "id": check_text})(value, param)
    if value.get("call_id") is None:  # the id of the item is the call id
        require_field(value, "id", f"{param}.call_id")
        check_text(value["id"], f"{param}.id")


_ITEMS: Mapping[str, Check] = {
    "message": object_with({"role": one_of(*_ROLES), "content": _CONTENT}),
    "function_call": object_with({**_CALL_ID, "name": check_text, "arguments": check_text}),
    "function_call_output": object_with({**_CALL_ID, "output": _CONTENT}),
    "custom_tool_call": object_with({**_CALL_ID, "name": check_text, "input": check_text}),
    "custom_tool_call_output": object_with({**_CALL_ID, "output": _CONTENT}),
    "tool_search_call": object_with({"arguments": accept_anything}, _CALL_ID),
    "tool_search_output": object_with({"tools": _LOADED_TOOLS}, _CALL_ID),
    "additional_tools": object_with({"role": one_of("developer"), "tools": _LOADED_TOOLS}),
    "shell_call": object_with(
        {**_CALL_ID, "action": check_mapping}, {"environment": check_mapping}
    ),
    "shell_call_output": object_with({**_CALL_ID, "output": array(check_mapping)}),
    "local_shell_call": object_with({**_CALL_ID, "action": check_mapping}),
    "local_shell_call_output": _check_local_shell_output,
    "apply_patch_call": object_with({**_CALL_ID, "operation": check_mapping}),
    "apply_patch_call_output": object_with(
        {**_CALL_ID, "status": check_text}, {"output": check_text}
    ),
    "item_reference": object_with({"id": check_text}),
}
"""Checks of the input items that the proxy reads."""
IGNORED_ITEM_TYPES = frozenset(
    {
        *("reasoning", "code_interpreter_call"),
        *("web_search_call", "file_search_call", "computer_call"),
        *("computer_call_output", "image_generation_call", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "additional_tools"),
        *("program", "program_output"),
        *("compaction", "compaction_trigger"),
    }
)
"""Types of input items that do not become messages, such as reasoning and calls of hosted tools."""


def item_type(item: Mapping[str, Any]) -> str:
    """Return the type of an item. Messages and references may omit the field."""
    if item.get("type") is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return str(item["type"])


def check_input_item(value: Any, param: str) -> None:
    check_mapping(value, param)
    if value.get("id") is not None:
        check_text(value["id"], f"{param}.id")
    kind = item_type(value)
    if kind in _ITEMS:
        _ITEMS[kind](value, param)
    elif kind not in IGNORED_ITEM_TYPES:
        raise unsupported_value_error(kind, sorted({*_ITEMS, *IGNORED_ITEM_TYPES}), f"{param}.type")


_TOOL_CHOICE = text_or_object(
    object_with(
        {"type": one_of(*_CHOICE_TYPES, "allowed_tools")},
        {"name": check_text, "mode": one_of("auto", "required"), "tools": array(check_mapping)},
    ),
    one_of("none", "auto", "required"),
)


_NAMED_SCHEMA = object_with(
    {"name": check_text, "schema": check_mapping},
    {"description": check_text, "strict": check_boolean},
)


def _check_json_schema_format(value: Any, param: str) -> None:
    _NAMED_SCHEMA(value, param)
    check_json_schema(value, param, f"{param}.schema")


_FORMAT = discriminated(
    {
        "json_object": accept_anything,
        "json_schema": _check_json_schema_format,
        "text": accept_anything,
    }
)
_TEXT_SETTINGS = object_with(
    optional={"format": _FORMAT, "verbosity": one_of("low", "medium", "high")}
)
_SUMMARY = one_of("auto", "concise", "detailed")
_REASONING = object_with(
    optional={
        "effort": reasoning_effort,
        "summary": _SUMMARY,
        "generate_summary": _SUMMARY,
        "context": check_text,
        "mode": check_text,
    }
)


INCLUDE_VALUES = (
    *("code_interpreter_call.outputs", "message.output_text.logprobs"),
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources"),
)
REFUSED_FIELDS: Mapping[str, str] = {
    "context_management": "The proxy itself compacts long contexts.",
    "prompt": "No prompts are stored here: send 'instructions' and 'input'.",
}
"""OpenAI's fields that this server does not support, with the hint that ends the error message."""
FIELDS: Mapping[str, Check] = {
    "model": check_text,
    "input": union(
        "a string or an array of objects",
        str,
        list,
        checks={list: array(check_input_item, maximum=MAX_MESSAGES)},
    ),
    "instructions": check_text,
    "tools": array(discriminated(_TOOLS)),
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": check_boolean,
    "max_tool_calls": integer(1),
    "text": _TEXT_SETTINGS,
    "reasoning": _REASONING,
    "max_output_tokens": integer(1),
    "include": array(one_of(*INCLUDE_VALUES)),
    "stream": check_boolean,
    "stream_options": object_with(optional={"include_obfuscation": check_boolean}),
    "truncation": one_of("auto", "disabled"),
    "background": check_boolean,
    "store": check_boolean,
    "previous_response_id": check_text,
    "conversation": text_or_object(object_with({"id": check_text})),
    **{name: _refusing_check(hint) for name, hint in REFUSED_FIELDS.items()},
    "metadata": check_mapping,
    "sandbox": check_mapping,
    "prompt_cache_options": accept_anything,
    "moderation": accept_anything,
    "access_programs": accept_anything,
    "background_options": accept_anything,
    "image": accept_anything,
    **{
        name: OPENAI[name].check
        for name in (
            *("temperature", "top_p", "top_logprobs", "user", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "service_tier"),
        )
    },
}
"""The checks of OpenAI's fields and of `sandbox`. A field that is not in the table is sent to the
backend unchanged."""
CHAT_FIELDS = {
    "messages": "'input'",
    "response_format": "'text.format'",
    "max_tokens": "'max_output_tokens'",
    "max_completion_tokens": "'max_output_tokens'",
    "reasoning_effort": "'reasoning.effort'",
    "verbosity": "'text.verbosity'",
    "functions": "'tools'",
    "function_call": "'tool_choice'",
    "n": "several requests",
}
"""Fields of chat completions, with the field of the Responses API to use instead."""


def check_fields(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError for a field of chat completions, or for the first invalid field."""
    for name, instead in CHAT_FIELDS.items():
        if body.get(name) is not None:
            raise unsupported_error(name, f"The Responses API has {instead} instead.")
    require_field(body, "input", "input")
    FIELDS["input"](body["input"], "input")
    for name, value in body.items():
        if value is not None and (known := FIELDS.get(name)):
            known(value, name)
