"""The fields of a chat completion request: their checks, and the model calls they are sent with.

`PARAMETERS` has every field that OpenAI or a backend documents. A field that is not in the table is
sent with every model call. OpenAI's fields are checked as OpenAI checks them. A backend's own field
is checked here only if no model call except the last has it: the backend would otherwise refuse an
invalid value only after all other calls of the run. Fields that the first call has are checked by
the backend.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.answer_form import schema_error
from proxy.errors import BadRequestError
from proxy.schemas.validation import (
    Check,
    accept_anything,
    array,
    check_boolean,
    check_mapping,
    check_text,
    combination_error,
    discriminated,
    integer,
    number,
    object_of,
    object_with,
    one_of,
    require_field,
    text_or_object,
    text_or_parts,
    union,
)

# Checks of messages, tools and answer formats. A value that at least one backend accepts passes.

_URL = text_or_object(object_with(optional={"url": check_text}))
_TEXT_PART = object_with({"type": one_of("text"), "text": check_text})
_PART_CHECKS: dict[str, Check] = {
    "text": _TEXT_PART,
    "image_url": object_with({"image_url": _URL}),
    "input_audio": object_with(
        {"input_audio": object_with({"data": check_text}, {"format": check_text})}
    ),
    "file": object_with(
        {
            "file": object_with(
                optional={"file_data": check_text, "file_id": check_text, "filename": check_text}
            )
        }
    ),
    "refusal": object_with({"refusal": check_text}),
}
"""OpenAI's part types. A part of another type is not checked."""


def check_content_part(value: Any, param: str) -> None:
    """Check a part of a message's content. vLLM accepts strings and parts without a type."""
    if isinstance(value, str):
        return
    check_mapping(value, param)
    kind = value.get("type")
    if kind is not None:
        check_text(kind, f"{param}.type")
        _PART_CHECKS.get(kind, accept_anything)(value, param)


_CALL = object_with(
    optional={
        "id": check_text,
        "function": object_with(
            optional={"name": check_text, "arguments": text_or_object(accept_anything)}
        ),
        "custom": object_with({"name": check_text, "input": check_text}),
    }
)
_MESSAGE = object_with(
    {"role": check_text},  # any role: chat templates know roles that OpenAI does not
    {
        "content": text_or_parts(check_content_part),
        "name": check_text,
        "tool_call_id": check_text,
        "tool_calls": array(_CALL),
        "function_call": object_with({"name": check_text}, {"arguments": check_text}),
        "refusal": check_text,
    },
)


def check_tool_name(value: Any, param: str) -> None:
    """Check the name of a tool, which must not be empty."""
    check_text(value, param)
    if not value:
        raise BadRequestError(
            f"Invalid '{param}': expected a name.", param=param, code="invalid_value"
        )


FUNCTION = object_with(
    {"name": check_tool_name},
    {"description": check_text, "parameters": check_mapping, "strict": check_boolean},
)
GRAMMAR = object_with({"syntax": one_of("lark", "regex"), "definition": check_text})


def custom_tool(check_grammar: Check) -> Check:
    """Return a check for a custom tool, whose input is any text, or text that follows a grammar."""

    def check_format(value: Any, param: str) -> None:
        check_mapping(value, param)
        one_of("text", "grammar")(value.get("type", "text"), f"{param}.type")
        if value.get("type") == "grammar":
            check_grammar(value, param)

    return object_with(
        {"name": check_tool_name}, {"description": check_text, "format": check_format}
    )


_CUSTOM_TOOL = object_with({"custom": custom_tool(object_with({"grammar": GRAMMAR}))})
_FUNCTION_TOOL = object_with({"function": FUNCTION}, {"type": check_text})


def _check_tool(value: Any, param: str) -> None:
    check_mapping(value, param)
    if value.get("type") == "custom":
        _CUSTOM_TOOL(value, param)
        return
    if "function" not in value and value.get("type") is not None:
        one_of("function", "custom")(value["type"], f"{param}.type")
    _FUNCTION_TOOL(value, param)


_NAMED_FUNCTION = object_with({"name": check_text})
_ALLOWED_TOOLS = object_with({"mode": one_of("auto", "required"), "tools": array(check_mapping)})
_TOOL_CHOICE_CHECKS: dict[str, Check] = {
    "function": object_with({"function": _NAMED_FUNCTION}),
    "custom": object_with({"custom": _NAMED_FUNCTION}),
    "allowed_tools": object_with({"allowed_tools": _ALLOWED_TOOLS}),
}


def _check_tool_choice_object(value: Any, param: str) -> None:
    """Check a `tool_choice` that is an object. vLLM accepts a function without a type."""
    kind = "function" if value.get("type") is None else value["type"]
    one_of(*_TOOL_CHOICE_CHECKS)(kind, f"{param}.type")
    _TOOL_CHOICE_CHECKS[kind](value, param)


_TOOL_CHOICE = text_or_object(_check_tool_choice_object, one_of("none", "auto", "required"))
_FUNCTION_CALL = text_or_object(_NAMED_FUNCTION, one_of("none", "auto"))
_STOP = union("a string or array of strings", str, list, checks={list: array(check_text)})
reasoning_effort = union(
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
"""The check of `reasoning_effort`: one of OpenAI's words, or a number, which SGLang accepts."""
_NAMED_SCHEMA = object_with(
    {"name": check_text},
    {"description": check_text, "schema": check_mapping, "strict": check_boolean},
)


def check_json_schema(
    answer_format: Mapping[str, Any], format_param: str, schema_param: str
) -> None:
    """Raise BadRequestError unless the `schema` of an answer format is a JSON Schema."""
    schema = answer_format.get("schema")
    if schema is not None and (fault := schema_error(schema)):
        raise BadRequestError(
            f"Invalid schema for {format_param} '{answer_format['name']}': {fault}",
            param=schema_param,
        )


def _check_json_schema_format(value: Any, param: str) -> None:
    require_field(value, "json_schema", f"{param}.json_schema")
    _NAMED_SCHEMA(value["json_schema"], f"{param}.json_schema")
    check_json_schema(value["json_schema"], param, param)


_RESPONSE_FORMAT = discriminated(
    {
        "json_object": accept_anything,
        "json_schema": _check_json_schema_format,
        "text": accept_anything,
        "structural_tag": accept_anything,  # of vLLM and SGLang, which check it themselves
    }
)


# The table

ParameterScope = Literal["every call", "visible answer", "loop", "proxy", "straight"]
"""The model calls that a field is sent with. `visible answer`: the call that writes the answer,
without tools. `loop`: the agent loop decides for each call. `proxy`: none. `straight`: the
single call of a request that gets no sandbox because of the field. A request for a chat completion
is then relayed unchanged, except for `sandbox` and the model's name."""
_EMPTY_VALUES: tuple[Any, ...] = (False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of the request body."""

    scope: ParameterScope
    check: Check = accept_anything
    null_like_values: Collection[Any] = _EMPTY_VALUES
    """Values that mean the same as null."""
    description: str = ""
    """The use of the field, if the scope does not describe it."""


MAX_CHOICES = 128
"""OpenAI's largest `n`."""
_INT64 = 2**63
_PROMPT_LOGPROBS = integer(-1)
_TOKEN_IDS = array(integer(0))
_WEB_SEARCH_OPTIONS = object_with(
    optional={
        "user_location": object_with(
            optional={"type": one_of("approximate"), "approximate": check_mapping}
        ),
        "search_context_size": one_of("low", "medium", "high"),
    }
)
_PREDICTION = object_with(
    {"type": one_of("content"), "content": text_or_parts(_TEXT_PART, minimum=1)}
)
_EVERY_CALL = Parameter("every call")
_STRAIGHT = Parameter("straight")
_LOGPROBS_FIELDS = ("top_logprobs", "logprob_token_ids")
_FLAG = Parameter("visible answer", check_boolean)
_TEXT = Parameter("visible answer", check_text)
_LIMITS_ANSWER = (
    "Limits the visible answer. A turn may generate at least `limits.min_turn_tokens` tokens."
)

OPENAI: Mapping[str, Parameter] = {
    "model": Parameter(
        "proxy",
        check_text,
        description="The suffix `:plain` is removed; such a request gets no sandbox.",
    ),
    "messages": Parameter(
        "proxy",
        array(_MESSAGE, minimum=1),
        description="The loop adds its prompt, and puts files of the messages into the sandbox.",
    ),
    "n": Parameter(
        "proxy",
        integer(1, MAX_CHOICES),
        description="Each answer is a run with a sandbox of its own.",
    ),
    "stream": Parameter(
        "proxy",
        check_boolean,
        description="The loop decides for each model call whether it streams.",
    ),
    "stream_options": Parameter(
        "proxy",
        object_with(
            optional={"include_usage": check_boolean, "include_obfuscation": check_boolean}
        ),
        description="With `include_usage` the last chunk has the usage. Requires `stream`.",
    ),
    "tools": Parameter(
        "loop", array(_check_tool), description="The model sees the sandbox's tools as well."
    ),
    "tool_choice": Parameter(
        "loop",
        _TOOL_CHOICE,
        description="`none`: no sandbox. `required`: the run ends with a call of one of `tools`. A"
        " function: only the first model call must call it.",
    ),
    "parallel_tool_calls": Parameter(
        "loop", check_boolean, description="Sent only if the request has tools."
    ),
    "functions": Parameter(
        "loop", array(FUNCTION), description="Sent as `tools`. Refused together with `tools`."
    ),
    "function_call": Parameter("loop", _FUNCTION_CALL, description="Sent as `tool_choice`."),
    "max_tokens": Parameter("loop", integer(1), description=_LIMITS_ANSWER),
    "max_completion_tokens": Parameter("loop", integer(1), description=_LIMITS_ANSWER),
    "response_format": Parameter(
        "visible answer", _RESPONSE_FORMAT, null_like_values=(*_EMPTY_VALUES, {"type": "text"})
    ),
    "stop": Parameter("visible answer", _STOP),
    "logprobs": _FLAG,
    "top_logprobs": Parameter("visible answer", integer(0, 20)),
    "logit_bias": Parameter("visible answer", object_of(number(-100, 100))),
    "prediction": Parameter("visible answer", _PREDICTION),
    "modalities": Parameter("every call", array(check_text)),
    "audio": Parameter("every call", check_mapping),
    "temperature": Parameter("every call", number(0, 2)),
    "top_p": Parameter("every call", number(0, 1)),
    "frequency_penalty": Parameter("every call", number(-2, 2)),
    "presence_penalty": Parameter("every call", number(-2, 2)),
    "seed": Parameter("every call", integer(-_INT64, _INT64 - 1)),
    "reasoning_effort": Parameter("every call", reasoning_effort),
    "verbosity": Parameter("every call", one_of("low", "medium", "high")),
    "service_tier": Parameter(
        "every call", one_of("auto", "default", "flex", "scale", "priority", "fast")
    ),
    "web_search_options": Parameter("every call", _WEB_SEARCH_OPTIONS),
    "metadata": Parameter("every call", check_mapping),
    "store": Parameter("every call", check_boolean),
    "user": Parameter("every call", check_text),
    "safety_identifier": Parameter("every call", check_text),
    "prompt_cache_key": Parameter("every call", check_text),
    "prompt_cache_retention": Parameter("every call", check_text),
    "prompt_cache_options": _EVERY_CALL,
    "moderation": _EVERY_CALL,
}

VLLM: Mapping[str, Parameter] = {
    "structured_outputs": Parameter("visible answer", check_mapping),
    "guided_json": Parameter("visible answer"),
    "guided_json_object": _FLAG,
    "guided_regex": _TEXT,
    "guided_choice": Parameter("visible answer", array(check_text)),
    "guided_grammar": _TEXT,
    "guided_whitespace_pattern": _TEXT,
    "stop_token_ids": Parameter("visible answer", _TOKEN_IDS),
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "min_tokens": Parameter("visible answer", integer(0)),
    "bad_words": Parameter("visible answer", array(check_text)),
    "allowed_token_ids": Parameter("visible answer", _TOKEN_IDS),
    "skip_special_tokens": Parameter("visible answer", check_boolean, null_like_values=(True,)),
    "spaces_between_special_tokens": Parameter(
        "visible answer", check_boolean, null_like_values=(True,)
    ),
    "prompt_logprobs": Parameter("visible answer", _PROMPT_LOGPROBS, null_like_values=()),
    "logprob_token_ids": Parameter("visible answer", _TOKEN_IDS),
    "return_tokens_as_token_ids": _FLAG,
    "return_token_ids": _FLAG,
    "return_prompt_text": _FLAG,
    "routed_experts_prompt_start": Parameter("visible answer", integer(0)),
    "echo": _FLAG,
    "continue_final_message": _STRAIGHT,
    "add_generation_prompt": _STRAIGHT,
    "kv_transfer_params": _STRAIGHT,
    "ec_transfer_params": _STRAIGHT,
    **dict.fromkeys(
        (
            *("top_k", "min_p", "repetition_penalty", "length_penalty", "use_beam_search"),
            *("watermarking", "repetition_detection", "thinking_token_budget"),
            *("include_reasoning", "truncate_prompt_tokens", "truncation_side"),
            *("add_special_tokens", "documents", "chat_template", "chat_template_kwargs"),
            *("media_io_kwargs", "mm_processor_kwargs", "priority", "request_id", "session_id"),
            *("cache_salt", "vllm_xargs", "stream_interval"),
        ),
        _EVERY_CALL,
    ),
}

SGLANG: Mapping[str, Parameter] = {
    "regex": _TEXT,
    "ebnf": _TEXT,
    "stop_regex": Parameter("visible answer", _STOP),
    "no_stop_trim": _FLAG,
    "return_hidden_states": Parameter("visible answer"),
    "return_routed_experts": _FLAG,
    "routed_experts_start_len": Parameter("visible answer", integer(0)),
    "return_cached_tokens_details": _FLAG,
    "return_prompt_token_ids": _FLAG,
    "return_meta_info": _FLAG,
    "input_ids": _STRAIGHT,
    "bootstrap_host": _STRAIGHT,
    "bootstrap_port": _STRAIGHT,
    "bootstrap_room": _STRAIGHT,
    "disagg_prefill_dp_rank": _STRAIGHT,
    **dict.fromkeys(
        (
            *("lora_path", "session_params", "separate_reasoning", "stream_reasoning"),
            *("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "images_config"),
            *("custom_logit_processor", "custom_params", "rid", "extra_key", "ngram_corpus_id"),
            *("routed_dp_rank", "data_parallel_rank", "task"),
        ),
        _EVERY_CALL,
    ),
}

LLAMA_CPP: Mapping[str, Parameter] = {
    "n_predict": Parameter("loop", integer(-2), description=_LIMITS_ANSWER),
    "grammar": _TEXT,
    "grammar_lazy": _FLAG,
    "grammar_triggers": Parameter("visible answer", array(accept_anything)),
    "preserved_tokens": Parameter("visible answer", array(accept_anything)),
    "json_schema": Parameter("visible answer", check_mapping, null_like_values=()),
}
"""The fields of llama.cpp, which refuses a request with both a grammar and tools."""

PARAMETERS: Mapping[str, Parameter] = {
    **OPENAI,
    **VLLM,
    **SGLANG,
    **LLAMA_CPP,
    "sandbox": Parameter(
        "proxy",
        object_with(optional={"session": check_text, "container_id": check_text}),
        description="The settings of the request's sandbox.",
    ),
}
GRAMMAR_PARAMS = frozenset(
    {"structured_outputs", "regex", "ebnf", "grammar", "json_schema"}
    | {name for name in VLLM if name.startswith("guided_")}
)
"""Fields that constrain the answer to a grammar. The proxy then adds no links to files to the
answer."""


def check_parameters(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError for the first field with an invalid value. Null means absent."""
    for name, value in body.items():
        if value is not None and (known := PARAMETERS.get(name)):
            known.check(value, name)
    for name in _LOGPROBS_FIELDS:
        if body.get(name) and not body.get("logprobs"):
            raise combination_error(f"'{name}' is only allowed where 'logprobs' is true.", name)
    if body.get("stream_options") and not body.get("stream"):
        raise combination_error(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    if body.get("prompt_logprobs") and body.get("stream"):
        raise combination_error("'prompt_logprobs' is not allowed in a stream.", "prompt_logprobs")


def params_for(body: Mapping[str, Any], *scopes: ParameterScope) -> dict[str, Any]:
    """Return the fields of the body that have one of these scopes. Unknown fields have the scope
    `every call`."""
    return {
        name: value
        for name, value in body.items()
        if PARAMETERS.get(name, _EVERY_CALL).scope in scopes
    }


def has_effect(name: str, value: Any) -> bool:
    """Return False for a value that means the same as null. Many clients send such values."""
    return value not in PARAMETERS[name].null_like_values
