"""POST /v1/messages: the checks of Anthropic's request, and its translation into a chat completion.

messages_input translates the messages and the tools, this module all other fields.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from proxy.errors import LOST_THREAD, BadRequestError, ProxyError
from proxy.schemas.chat_parameters import params_for
from proxy.schemas.chat_request import ChatTranslation
from proxy.schemas.messages_input import (
    CODE_EXECUTION,
    SYSTEM,
    MessagesToolSet,
    Tool,
    chat_tool,
    chat_tool_choice,
    read_tools,
    to_chat_messages,
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
    number,
    object_with,
    one_of,
    require_field,
    text_or_object,
    text_or_parts,
)

# Checks

_TEXT = object_with({"text": check_text})
_BASE64 = object_with({"media_type": check_text, "data": check_text})
_URL = object_with({"url": check_text})
_FILE = object_with({"file_id": check_text})
_IMAGE = object_with({"source": discriminated({"base64": _BASE64, "url": _URL, "file": _FILE})})
_TEXT_BLOCK = discriminated({"text": _TEXT})
_DOCUMENT_TEXT = text_or_parts(discriminated({"text": _TEXT, "image": _IMAGE}))
_DOCUMENT_SOURCES: Mapping[str, Check] = {
    "base64": _BASE64,
    "text": object_with({"data": check_text}),
    "url": _URL,
    "file": _FILE,
    "content": object_with({"content": _DOCUMENT_TEXT}),
}
_CONTENT_BLOCKS: Mapping[str, Check] = {
    "text": _TEXT,
    "image": _IMAGE,
    "document": object_with(
        {"source": discriminated(_DOCUMENT_SOURCES)}, {"title": check_text, "context": check_text}
    ),
    "search_result": object_with(
        {"title": check_text, "source": check_text, "content": array(_TEXT_BLOCK)}
    ),
}
_RESULT_BLOCKS: Mapping[str, Check] = {
    **_CONTENT_BLOCKS,
    "tool_reference": object_with({"tool_name": check_text}),
}
_USER_BLOCKS: Mapping[str, Check] = {
    **_CONTENT_BLOCKS,
    "tool_result": object_with(
        {"tool_use_id": check_text},
        {"is_error": check_boolean, "content": text_or_parts(discriminated(_RESULT_BLOCKS))},
    ),
    "container_upload": _FILE,
}
_ASSISTANT_BLOCKS: Mapping[str, Check] = {
    "text": _TEXT,
    "tool_use": object_with({"id": check_text, "name": check_text, "input": check_mapping}),
    "compaction": object_with(optional={"content": check_text}),
}
_SYSTEM = text_or_parts(_TEXT_BLOCK)
_MESSAGE = discriminated(
    {
        "user": object_with({"content": text_or_parts(discriminated(_USER_BLOCKS), minimum=1)}),
        # Thinking and the results of server tools have many types, and are dropped.
        "assistant": object_with(
            {
                "content": text_or_parts(
                    discriminated(_ASSISTANT_BLOCKS, check_other=accept_anything)
                )
            }
        ),
        "system": object_with({"content": _SYSTEM}),
    },
    tag="role",
)
_THINKING = discriminated(
    {
        "enabled": object_with(optional={"budget_tokens": integer(1), "display": check_text}),
        "adaptive": object_with(optional={"display": check_text}),
        "between_tools": accept_anything,
        "disabled": accept_anything,
    }
)
_PARALLEL_FIELD: Mapping[str, Check] = {"disable_parallel_tool_use": check_boolean}
_TOOL_CHOICE = discriminated(
    {
        "auto": object_with(optional=_PARALLEL_FIELD),
        "any": object_with(optional=_PARALLEL_FIELD),
        "tool": object_with({"name": check_text}, _PARALLEL_FIELD),
        "none": accept_anything,
    }
)
_FORMAT = discriminated({"json_schema": object_with({"schema": check_mapping})})
_EFFORTS = one_of("low", "medium", "high", "xhigh", "max")


class Field(NamedTuple):
    """A field of the request body."""

    check: Check
    description: str = "The same in a chat completion."
    """For the documentation: what this field becomes in a chat completion, or how it is used."""


FIELDS: Mapping[str, Field] = {
    "model": Field(check_text),
    "max_tokens": Field(integer(1)),
    "messages": Field(array(_MESSAGE, minimum=1, maximum=MAX_MESSAGES), "Becomes `messages`."),
    "system": Field(_SYSTEM, "Becomes a system message."),
    "stop_sequences": Field(array(check_text), "Becomes `stop`."),
    "stream": Field(check_boolean),
    "temperature": Field(number(0, 1)),
    "top_p": Field(number(0, 1)),
    "top_k": Field(integer(0)),
    "metadata": Field(object_with(optional={"user_id": check_text}), "`user_id` becomes `user`."),
    "service_tier": Field(one_of("auto", "standard_only"), "Becomes `service_tier`."),
    "thinking": Field(_THINKING, "Decides whether the answer shows reasoning. Not sent."),
    "tool_choice": Field(_TOOL_CHOICE, "Becomes `tool_choice` and `parallel_tool_calls`."),
    "tools": Field(
        array(check_mapping),
        "Become `tools`. The code execution tool becomes the sandbox's tools.",
    ),
    "output_config": Field(
        object_with(optional={"effort": _EFFORTS, "format": _FORMAT}),
        "`effort` becomes `reasoning_effort`, `format` becomes `response_format`.",
    ),
    "output_format": Field(_FORMAT, "Becomes `response_format`."),
    "container": Field(
        text_or_object(object_with(optional={"id": check_text})),
        "Becomes `sandbox.container_id`. Skills are refused.",
    ),
    "mcp_servers": Field(array(check_mapping), "Refused unless empty."),
    "thread": Field(
        object_with({"type": one_of("create", "continue")}, {"previous_message_id": check_text}),
        "`create` has no effect. `continue` is refused with status 404.",
    ),
    "compaction": Field(check_mapping, "Refused unless empty."),
    "sandbox": Field(check_mapping, "The settings of the request's sandbox."),
}


def _check_fields(body: Mapping[str, Any], required: Collection[str]) -> None:
    """Raise BadRequestError for the first field that is missing or invalid."""
    for name in required:
        require_field(body, name, name)
    for name, field in FIELDS.items():
        if body.get(name) is not None or name in required:
            field.check(body[name], name)


# Translation

_UNCHANGED_FIELDS = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields that chat completions have under the same name."""
DROPPED_FIELDS = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
    *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token"),
)
"""Fields for Anthropic's servers that do not change an answer. The translation drops them."""
REFUSED_FIELDS = {"mcp_servers": "MCP servers", "compaction": "Compactions"}
"""Fields that change an answer and are not supported, with the name of the feature. The proxy
refuses a request in which such a field is not empty."""
_CONTINUE_FIELDS = {"continue_final_message": True, "add_generation_prompt": False}
"""The fields that make vLLM and SGLang continue the last message, if it is the assistant's."""
_SERVICE_TIERS = {"auto": "auto", "standard_only": "default"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesAsChat(ChatTranslation):
    """A request of Anthropic's Messages API as a chat completion."""

    # A chat content part has other fields than the block from which it was translated.
    keeps_param_suffix: ClassVar[bool] = False

    client_tools: Sequence[Tool]
    """The client's tools, each with its schema."""
    has_code_execution: bool
    """True if the request has the code execution tool, which enables the sandbox."""
    wants_thinking: bool
    """True if the client wants to see the model's thinking."""
    stop_sequences: tuple[str, ...]


def as_chat(body: Mapping[str, Any]) -> MessagesAsChat:
    """Return the chat completion for a request. Raises BadRequestError."""
    return _as_chat(body, ("model", "max_tokens", "messages"))


def as_chat_for_token_count(body: Mapping[str, Any]) -> MessagesAsChat:
    """Return the chat completion for a request to count tokens, which needs no `max_tokens`. Raises
    BadRequestError."""
    return _as_chat(body, ("model", "messages"))


def _as_chat(body: Mapping[str, Any], required: tuple[str, ...]) -> MessagesAsChat:
    _check_fields(body, required)
    fields = {name: value for name, value in body.items() if value is not None}
    for name, feature in REFUSED_FIELDS.items():
        if fields.get(name):
            raise BadRequestError(f"{feature} are not served here.", param=name)
    if fields.get("thread", {}).get("type") == "continue":
        raise ProxyError(
            "Threads are not stored here: send all messages of the thread.",
            status=404,
            type="invalid_request_error",
            code=LOST_THREAD,
            param="thread.previous_message_id",
        )
    if all(message["role"] == SYSTEM for message in fields["messages"]):
        raise BadRequestError("At least one message of the user is needed.", param="messages")
    tools = read_tools(fields.get("tools", []))
    translated = to_chat_messages(fields.get("system"), fields["messages"])
    thinking = fields.get("thinking", {"type": "disabled"})
    choice = fields.get("tool_choice", {})
    unknown = {
        name: fields[name] for name in fields if name not in FIELDS and name not in DROPPED_FIELDS
    }
    return MessagesAsChat(
        chat={
            **{name: fields[name] for name in _UNCHANGED_FIELDS if name in fields},
            **params_for(unknown, "every call"),
            "messages": translated.messages,
            **_renamed_parameters(fields),
            **(_CONTINUE_FIELDS if translated.messages[-1]["role"] == "assistant" else {}),
            **_tool_params(fields, tools),
            **_sandbox_field(fields),
        },
        param_paths=translated.param_paths,
        client_tools=tools.client_tools,
        has_code_execution=tools.has_code_execution,
        starts_with_tool=tools.has_code_execution
        and (choice.get("type") == "any" or choice.get("name") == CODE_EXECUTION),
        wants_thinking=thinking["type"] != "disabled" and thinking.get("display") != "omitted",
        stop_sequences=tuple(fields.get("stop_sequences", ())),
    )


def _renamed_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that have another name in a chat completion."""
    params: dict[str, Any] = {}
    if fields.get("stop_sequences"):
        params["stop"] = fields["stop_sequences"]
    if user := fields.get("metadata", {}).get("user_id"):
        params["user"] = user
    if "service_tier" in fields:
        params["service_tier"] = _SERVICE_TIERS[fields["service_tier"]]
    output = fields.get("output_config", {})
    if output.get("effort"):
        params["reasoning_effort"] = output["effort"]
    if form := output.get("format") or fields.get("output_format"):
        named = {"name": "answer", "schema": form["schema"], "strict": True}
        params["response_format"] = {"type": "json_schema", "json_schema": named}
    return params


def _tool_params(fields: Mapping[str, Any], tools: MessagesToolSet) -> dict[str, Any]:
    params = {"tools": list(map(chat_tool, tools.client_tools))} if tools.client_tools else {}
    choice = fields.get("tool_choice")
    return params if choice is None else {**params, **chat_tool_choice(choice, tools)}


def _sandbox_field(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `sandbox` field. If it has no `container_id`, it gets the id of `container`.
    Raises BadRequestError if `container` has skills."""
    sandbox = fields.get("sandbox", {})
    container = fields.get("container", {})
    container_id = container if isinstance(container, str) else container.get("id")
    if not isinstance(container, str) and container.get("skills"):
        raise BadRequestError("Skills are not served here.", param="container.skills")
    if container_id:
        sandbox = {"container_id": container_id, **sandbox}
    return {"sandbox": sandbox} if sandbox else {}


def token_count_request(body: Mapping[str, Any], translation: MessagesAsChat) -> dict[str, Any]:
    """Return a request to count tokens, in the form that servers other than Anthropic's accept:
    each tool has its schema."""
    others = {name: value for name, value in body.items() if name not in ("sandbox", "tools")}
    tools = list(translation.client_tools)
    return {**others, "tools": tools} if tools else others
