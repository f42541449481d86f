"""Checks of the fields of POST /v1/responses, and of the items of its input and its tools."""

from collections.abc import Mapping
from typing import Any

from policies.answer_form import schema_error
from proxy.errors import BadRequestError
from proxy.schemas.chat_parameters import (
    FORMATS,
    GRAMMAR,
    OPENAI,
    input_format,
    part,
    reasoning_effort,
    tool_name,
)
from proxy.schemas.validation import (
    Check,
    anything,
    array,
    boolean,
    discriminated,
    fields,
    integer,
    mapping,
    not_among,
    object_with,
    one_of,
    require,
    text,
    text_or_object,
    text_or_parts,
    union,
    unsupported,
)

_ROLES = ("assistant", "system", "developer", "user")
_CHOSEN = (
    *("function", "custom", "shell", "code_interpreter"),
    *("local_shell", "apply_patch"),
)
"""The types of tools that `tool_choice` can name."""
LEFT_OUT = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
)
"""Tools that are not available but accepted, because coding agents send them with every request."""
MEMORY_LIMITS = ("1g", "4g", "16g", "64g")


def _container(kind: str) -> Check:
    described = object_with(
        {"type": text},
        {
            "file_ids": array(text),
            "memory_limit": one_of(*MEMORY_LIMITS),
            "network_policy": object_with({"type": one_of("disabled", "allowlist")}),
            "container_id": text,
        },
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


_FUNCTIONS: Mapping[str, Check] = {
    "function": object_with(
        {"name": tool_name}, {"description": text, "parameters": mapping, "strict": boolean}
    ),
    "custom": object_with(
        {"name": tool_name}, {"description": text, "format": input_format(GRAMMAR)}
    ),
}
_OWN: Mapping[str, Check] = {
    **_FUNCTIONS,
    "namespace": object_with(
        {
            "name": tool_name,
            "description": text,
            "tools": array(discriminated(_FUNCTIONS), minimum=1),
        }
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
    "code_interpreter": object_with({"container": text_or_object(_container("auto"))}),
    **_LEFT_OUT,
}
_LOADED_TOOLS = array(discriminated({**_OWN, **_LEFT_OUT}))
"""Tools that an item of the input adds."""
_PARTS: Mapping[str, Check] = {
    "input_text": object_with({"text": text}),
    "input_image": fields({"image_url": text, "file_id": text, "detail": text}),
    "input_file": fields({"file_data": text, "file_id": text, "file_url": text, "filename": text}),
    "output_text": object_with({"text": text}),
}
_CONTENT = text_or_parts(discriminated(_PARTS, others=part))
_CALL_ID: Mapping[str, Check] = {"call_id": text}


def _local_output(value: Any, param: str) -> None:
    object_with({"output": text}, {**_CALL_ID, "id": text})(value, param)
    if value.get("call_id") is None:  # then the id of the item is the call's
        require(value, "id", f"{param}.call_id")
        text(value["id"], f"{param}.id")


_ITEMS: Mapping[str, Check] = {
    "message": object_with({"role": one_of(*_ROLES), "content": _CONTENT}),
    "function_call": object_with({**_CALL_ID, "name": text, "arguments": text}),
    "function_call_output": object_with({**_CALL_ID, "output": _CONTENT}),
    "custom_tool_call": object_with({**_CALL_ID, "name": text, "input": text}),
    "custom_tool_call_output": object_with({**_CALL_ID, "output": _CONTENT}),
    "tool_search_call": fields(_CALL_ID, required=["arguments"]),
    "tool_search_output": object_with({"tools": _LOADED_TOOLS}, _CALL_ID),
    "additional_tools": object_with({"role": one_of("developer"), "tools": _LOADED_TOOLS}),
    "shell_call": object_with({**_CALL_ID, "action": mapping}, {"environment": mapping}),
    "shell_call_output": object_with({**_CALL_ID, "output": array(mapping)}),
    "local_shell_call": object_with({**_CALL_ID, "action": mapping}),
    "local_shell_call_output": _local_output,
    "apply_patch_call": object_with({**_CALL_ID, "operation": mapping}),
    "apply_patch_call_output": object_with({**_CALL_ID, "status": text}, {"output": text}),
    "item_reference": object_with({"id": text}),
}
"""Types of input items that are read."""
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
"""Types of input items that hosted tools and thinking left: the model does not see them again."""


def item_type(item: Mapping[str, Any]) -> str:
    """Return the type of an item. Messages and references may leave it out."""
    if item.get("type") is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return str(item["type"])


def item(value: Any, param: str) -> None:
    """Check an item of the input."""
    mapping(value, param)
    if value.get("id") is not None:
        text(value["id"], f"{param}.id")
    kind = item_type(value)
    if kind in _ITEMS:
        _ITEMS[kind](value, param)
    elif kind not in PASSED_OVER:
        raise not_among(kind, sorted({*_ITEMS, *PASSED_OVER}), f"{param}.type")


_TOOL_CHOICE = text_or_object(
    object_with(
        {"type": one_of(*_CHOSEN, "allowed_tools")},
        {"name": text, "mode": one_of("auto", "required"), "tools": array(mapping)},
    ),
    one_of("none", "auto", "required"),
)


def _text_format(value: Any, param: str) -> None:
    mapping(value, param)
    require(value, "type", f"{param}.type")
    one_of(*FORMATS)(value["type"], f"{param}.type")
    if value["type"] != "json_schema":
        return
    _NAMED_SCHEMA(value, param)
    if fault := schema_error(value["schema"]):
        raise BadRequestError(
            f"Invalid schema for {param} '{value['name']}': {fault}", param=f"{param}.schema"
        )


_NAMED_SCHEMA = object_with(
    {"name": text, "schema": mapping}, {"description": text, "strict": boolean}
)
_TEXT_SETTINGS = fields({"format": _text_format, "verbosity": one_of("low", "medium", "high")})
_SUMMARY = one_of("auto", "concise", "detailed")
_REASONING = fields(
    {
        "effort": reasoning_effort,
        "summary": _SUMMARY,
        "generate_summary": _SUMMARY,
        "context": text,
        "mode": text,
    }
)


def _unavailable(words: str) -> Check:
    """Return a check that refuses every value."""

    def check(value: Any, param: str) -> None:
        raise unsupported(param, words)

    return check


INCLUDES = (
    *("code_interpreter_call.outputs", "message.output_text.logprobs"),
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources"),
)
FIELDS: Mapping[str, Check] = {
    "model": text,
    "input": union("a string or an array of objects", str, list, checks={list: array(item)}),
    "instructions": text,
    "tools": array(discriminated(_TOOLS)),
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": boolean,
    "max_tool_calls": integer(1),
    "text": _TEXT_SETTINGS,
    "reasoning": _REASONING,
    "max_output_tokens": integer(1),
    "include": array(one_of(*INCLUDES)),
    "stream": boolean,
    "stream_options": fields({"include_obfuscation": boolean}),
    "truncation": one_of("auto", "disabled"),
    "background": boolean,
    "store": boolean,
    "previous_response_id": text,
    "conversation": text_or_object(object_with({"id": text})),
    "context_management": _unavailable("Long contexts are shortened by the proxy itself."),
    "prompt": _unavailable("No prompts are stored here: send 'instructions' and 'input'."),
    "metadata": mapping,
    "sandbox": mapping,
    "prompt_cache_options": anything,
    "moderation": anything,
    "access_programs": anything,
    "background_options": anything,
    "image": anything,
    **{
        name: OPENAI[name].check
        for name in (
            *("temperature", "top_p", "top_logprobs", "user", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "service_tier"),
        )
    },
}
"""Every field of OpenAI's, and `sandbox`. Other fields travel on unchanged."""
_ELSEWHERE = {
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
"""Fields of a chat completion, and what the Responses API has instead."""


def check_fields(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError for a field of chat completions, then for the first invalid field."""
    for name, instead in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise unsupported(name, f"In the Responses API there is {instead} for it.")
    require(body, "input", "input")
    FIELDS["input"](body["input"], "input")
    for name, value in body.items():
        if value is not None and (known := FIELDS.get(name)):
            known(value, name)
