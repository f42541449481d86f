"""POST /v1/responses: a request checked in its own words, and the chat completion it comes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import ProxyError
from proxy.wire.chat_parameters import OPENAI
from proxy.wire.responses_functions import brought
from proxy.wire.responses_input import told
from proxy.wire.responses_shapes import (
    item,
    reasoning,
    refused,
    text_settings,
    tool,
    tool_choice,
)
from proxy.wire.responses_tools import AskedTools, asked_tools, chat_choice, tool_first
from proxy.wire.validation import Check, anything, array, boolean, either, fields, integer, mapping, one_of, require, text, unsupported

INCLUDES = (
    *("code_interpreter_call.outputs", "message.output_text.logprobs"),
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources"),
)
FIELDS: Mapping[str, Check] = {
    "model": text,
    "input": either("a string or an array of objects", str, list, checks={list: array(item)}),
    "instructions": text,
    "tools": array(tool),
    "tool_choice": tool_choice,
    "parallel_tool_calls": boolean,
    "max_tool_calls": integer(1),
    "text": text_settings,
    "reasoning": reasoning,
    "max_output_tokens": integer(1),
    "include": array(one_of(*INCLUDES)),
    "stream": boolean,
    "stream_options": fields({"include_obfuscation": boolean}),
    "truncation": one_of("auto", "disabled"),
    "background": boolean,
    "store": boolean,
    "previous_response_id": text,
    "conversation": either(
        "a string or an object", str, dict, checks={dict: fields({"id": text}, required=["id"])}
    ),
    "context_management": refused("Long contexts are shortened by the proxy itself."),
    "prompt": refused("No prompts are stored here: send 'instructions' and 'input'."),
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
"""Every field that OpenAI has, and ours. A field that is not here is carried."""
_OWN = frozenset(
    {
        *("input", "instructions", "tools", "tool_choice", "max_tool_calls", "text", "reasoning"),
        *("max_output_tokens", "include", "stream_options", "truncation", "background", "store"),
        *("previous_response_id", "conversation", "sandbox"),
        *("access_programs", "background_options", "image"),
    }
)
"""What a chat completion has under another name, or not at all."""
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
"""Fields of a chat completion, and what there is for them here."""
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class AsChat:
    """A request as a chat completion."""

    chat: Mapping[str, Any]
    tools: AskedTools
    names: Mapping[str, str]
    """Places in it, and what the client calls them."""
    tool_first: bool = False
    """Whether the run is to begin with a tool, be it the computer."""

    def in_own_words(self, error: ProxyError) -> ProxyError:
        """An error that names the client's own place."""
        param = error.param or ""
        for place, own in self.names.items():
            if param == place or param.startswith((f"{place}.", f"{place}[")):
                error.param = own + param.removeprefix(place)
                error.message = error.message.replace(f"'{place}", f"'{own}")
                return error
        return error


def as_chat(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()) -> AsChat:
    """The chat completion that answers it, after the items of what it goes on from.

    Raises BadRequestError, NotFoundError.
    """
    _check_fields(body)
    items = body["input"] if isinstance(body["input"], list) else []
    tools = asked_tools(body.get("tools") or [], brought([*earlier, *items]))
    talk = told(body.get("instructions"), body["input"], earlier)
    names: dict[str, str] = {}
    for index, (message, place) in enumerate(zip(talk.messages, talk.places, strict=True)):
        if message["role"] == "tool":
            names[f"messages[{index}].content"] = f"{place}.output"
        names[f"messages[{index}]"] = place
    ours = dict(body.get("sandbox") or {})
    before = ours.get("file_ids") or []
    if tools.files and isinstance(before, list):
        ours["file_ids"] = [*before, *(file_id for _, file_id in tools.files)]
        for index, (param, _) in enumerate(tools.files, len(before)):
            names[f"sandbox.file_ids[{index}]"] = param
    if tools.container_id and not ours.get("container_id"):
        ours["container_id"] = tools.container_id
    carried = {key: value for key, value in body.items() if key not in _OWN}
    placed = _renamed(body, tools)
    given = {key: value for key, value in placed.items() if value is not None}
    whole = {**carried, **given, "messages": talk.messages, "sandbox": ours}
    first = tool_first(body.get("tool_choice"), tools)
    return AsChat(whole, tools, {**names, **_NAMES}, first)


_NAMES = {
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


def wants(body: Mapping[str, Any], what: str) -> bool:
    """Whether `include` names it."""
    return what in (body.get("include") or [])


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, instead in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise unsupported(name, f"In the Responses API there is {instead} for it.")
    require(body, "input", "input")
    FIELDS["input"](body["input"], "input")
    for name, value in body.items():
        if value is not None and (known := FIELDS.get(name)):
            known(value, name)


def _renamed(body: Mapping[str, Any], tools: AskedTools) -> dict[str, Any]:
    """What a chat completion has under another name; None where nothing was said."""
    settings = body.get("text") or {}
    wants_logprobs = wants(body, LOGPROBS) or body.get("top_logprobs")
    return {
        "tools": list(tools.functions) or None,
        "tool_choice": chat_choice(body.get("tool_choice"), tools),
        "response_format": _response_format(settings.get("format")),
        "verbosity": settings.get("verbosity"),
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "max_completion_tokens": body.get("max_output_tokens"),
        "logprobs": True if wants_logprobs else None,
    }


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form["type"] != "json_schema":
        return dict(form)
    named = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": named}
