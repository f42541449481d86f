"""Every field of a chat completion that backends know: where it goes, what it may be.

A field that is not here goes with every model call. OpenAI's own are checked as OpenAI does it. Of
the others those are checked that go with the last call alone, so that no run is spent on what is
refused at its end; the rest meets its backend at the first call.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proxy.wire.chat_shapes import (
    function,
    function_call,
    message,
    reasoning_effort,
    response_format,
    stop,
    text_part,
    tool,
    tool_choice,
)
from proxy.wire.validation import Check, anything, array, boolean, either, fields, integer, mapping, not_together, number, one_of, text, values

Place = Literal["every call", "visible answer", "loop", "proxy", "straight"]
"""Which model calls a field goes with: `visible answer` is the call that writes it, without tools;
`loop`: what the loop decides for each call; `proxy`: never sent on; `straight`: the whole request
goes to the backend as it is (see policies.routing)."""


NOTHING: tuple[Any, ...] = (False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of the request."""

    place: Place
    check: Check = anything
    idle: Collection[Any] = NOTHING
    """The values that change nothing, beside null."""


MAX_CHOICES = 128
"""OpenAI's bound of `n`."""
_INT64 = 2**63
_TOKENS = integer(-1)
_TOKEN_IDS = array(integer(0))
_SEARCH = fields(
    {
        "user_location": fields({"type": one_of("approximate"), "approximate": mapping}),
        "search_context_size": one_of("low", "medium", "high"),
    }
)
_PREDICTION = fields(
    {
        "type": one_of("content"),
        "content": either(
            "a string or array of objects",
            str,
            list,
            checks={list: array(text_part, minimum=1)},
        ),
    },
    required=["type", "content"],
)
_EVERY = Parameter("every call")
_STRAIGHT = Parameter("straight")
_WITH_LOGPROBS = ("top_logprobs", "logprob_token_ids")
_FLAG = Parameter("visible answer", boolean)
_WORDS = Parameter("visible answer", text)

OPENAI: Mapping[str, Parameter] = {
    "model": Parameter("proxy", text),
    "messages": Parameter("proxy", array(message, minimum=1)),
    "n": Parameter("proxy", integer(1, MAX_CHOICES)),
    "stream": Parameter("proxy", boolean),
    "stream_options": Parameter(
        "proxy", fields({"include_usage": boolean, "include_obfuscation": boolean})
    ),
    "tools": Parameter("loop", array(tool)),
    "tool_choice": Parameter("loop", tool_choice),
    "parallel_tool_calls": Parameter("loop", boolean),
    "functions": Parameter("loop", array(function)),
    "function_call": Parameter("loop", function_call),
    "max_tokens": Parameter("loop", integer(1)),
    "max_completion_tokens": Parameter("loop", integer(1)),
    "response_format": Parameter(
        "visible answer", response_format, idle=(*NOTHING, {"type": "text"})
    ),
    "stop": Parameter("visible answer", stop),
    "logprobs": _FLAG,
    "top_logprobs": Parameter("visible answer", integer(0, 20)),
    "logit_bias": Parameter("visible answer", values(number(-100, 100))),
    "prediction": Parameter("visible answer", _PREDICTION),
    "modalities": Parameter("every call", array(text)),
    "audio": Parameter("every call", mapping),
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
    "web_search_options": Parameter("every call", _SEARCH),
    "metadata": Parameter("every call", mapping),
    "store": Parameter("every call", boolean),
    "user": Parameter("every call", text),
    "safety_identifier": Parameter("every call", text),
    "prompt_cache_key": Parameter("every call", text),
    "prompt_cache_retention": Parameter("every call", text),
    "prompt_cache_options": _EVERY,
    "moderation": _EVERY,
}

VLLM: Mapping[str, Parameter] = {
    "structured_outputs": Parameter("visible answer", mapping),
    "guided_json": Parameter("visible answer"),
    "guided_json_object": _FLAG,
    "guided_regex": _WORDS,
    "guided_choice": Parameter("visible answer", array(text)),
    "guided_grammar": _WORDS,
    "guided_whitespace_pattern": _WORDS,
    "stop_token_ids": Parameter("visible answer", _TOKEN_IDS),
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "min_tokens": Parameter("visible answer", integer(0)),
    "bad_words": Parameter("visible answer", array(text)),
    "allowed_token_ids": Parameter("visible answer", _TOKEN_IDS),
    "skip_special_tokens": Parameter("visible answer", boolean, idle=(True,)),
    "spaces_between_special_tokens": Parameter("visible answer", boolean, idle=(True,)),
    "prompt_logprobs": Parameter("visible answer", _TOKENS, idle=()),
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
        _EVERY,
    ),
}

SGLANG: Mapping[str, Parameter] = {
    "regex": _WORDS,
    "ebnf": _WORDS,
    "stop_regex": Parameter("visible answer", stop),
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
        _EVERY,
    ),
}

LLAMA_CPP: Mapping[str, Parameter] = {
    "n_predict": Parameter("loop", integer(-2)),
    "grammar": _WORDS,
    "grammar_lazy": _FLAG,
    "grammar_triggers": Parameter("visible answer", array(anything)),
    "preserved_tokens": Parameter("visible answer", array(anything)),
    "json_schema": Parameter("visible answer", mapping, idle=()),
}
"""It refuses a grammar beside tools."""

PARAMETERS: Mapping[str, Parameter] = {
    **OPENAI,
    **VLLM,
    **SGLANG,
    **LLAMA_CPP,
    "sandbox": Parameter("proxy", fields({"session": text, "container_id": text})),
}
GRAMMARS = frozenset(
    {"structured_outputs", "regex", "ebnf", "grammar", "json_schema"}
    | {name for name in VLLM if name.startswith("guided_")}
)
"""What holds the visible answer to a form that leaves no room for links."""


def check_parameters(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError for the first field that is not what it may be; null is none."""
    for name, value in body.items():
        if value is not None and (known := PARAMETERS.get(name)):
            known.check(value, name)
    for name in _WITH_LOGPROBS:
        if body.get(name) and not body.get("logprobs"):
            raise not_together(f"'{name}' is only allowed where 'logprobs' is true.", name)
    if body.get("stream_options") and not body.get("stream"):
        raise not_together(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    if body.get("prompt_logprobs") and body.get("stream"):
        raise not_together("'prompt_logprobs' are not to be had in a stream.", "prompt_logprobs")


def placed(body: Mapping[str, Any], *places: Place) -> dict[str, Any]:
    """The fields that go to one of the places."""
    return {
        name: value for name, value in body.items() if PARAMETERS.get(name, _EVERY).place in places
    }


def shapes(name: str, value: Any) -> bool:
    """Whether a value changes the answer; many clients send the defaults along."""
    return value not in PARAMETERS[name].idle
