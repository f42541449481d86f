"""OpenAI's words for litellm and back. Pure."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_ARGUMENTS = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("temperature", "top_p", "top_k", "n", "seed", "stop", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"),
        *("max_tokens", "max_completion_tokens", "stream", "stream_options", "response_format"),
        *("reasoning_effort", "thinking", "verbosity", "modalities", "audio", "prediction"),
        *("web_search_options", "service_tier", "store", "prompt_cache_key"),
        *("safety_identifier", "user"),
    }
)
"""What litellm translates for each provider."""


def call_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `acompletion` that say what the body says.

    A field that litellm does not translate goes into `extra_body`, never among the arguments: there
    a client's `api_base` or `vertex_credentials` would send our key to a place of its choice.
    The copy is deep because litellm changes tools and messages where they lie.
    """
    fields = {key: deepcopy(value) for key, value in body.items() if key != "model"}
    arguments = {key: fields[key] for key in fields if key in _ARGUMENTS}
    extra = {key: fields[key] for key in fields if key not in _ARGUMENTS}
    return {**arguments, "extra_body": extra} if extra else arguments


def as_openai(answer: Mapping[str, Any], *, openai_like: bool) -> dict[str, Any]:
    """A dumped completion or chunk as the provider said it.

    litellm moves the fields that it does not know to `provider_specific_fields`. Behind an
    `openai_like` provider they are the backend's own and go back to their places; behind others
    litellm reads some of them again from there (Gemini's signatures), so only copies go.
    """
    choices = [_choice(choice, openai_like) for choice in answer.get("choices") or []]
    return {**answer, "choices": choices}


def _choice(choice: Mapping[str, Any], openai_like: bool) -> dict[str, Any]:
    choice = _replaced(choice, openai_like)
    if "delta" in choice:
        choice["delta"] = _replaced(choice["delta"], openai_like)
    if "message" in choice:
        choice["message"] = {"content": None, **_replaced(choice["message"], openai_like)}
    return choice


def _replaced(fields: Mapping[str, Any], openai_like: bool) -> dict[str, Any]:
    whole = {key: value for key, value in fields.items() if key != "provider_specific_fields"}
    moved = {
        key: value
        for key, value in (fields.get("provider_specific_fields") or {}).items()
        if value is not None and key not in whole
    }
    if openai_like:
        return {**whole, **moved}
    return {**whole, "provider_specific_fields": moved} if moved else whole
