"""POST /v1/messages: Anthropic's request, checked, as the chat completion that asks for the same.

messages_input translates its messages and tools; this module checks all fields and translates the
others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import LOST_THREAD, BadRequestError, ProxyError
from proxy.schemas.chat_parameters import params_for
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
    Check,
    anything,
    array,
    boolean,
    discriminated,
    fields,
    integer,
    mapping,
    number,
    object_with,
    one_of,
    require,
    text,
    text_or_object,
    text_or_parts,
)

# Checks

_TEXT = object_with({"text": text})
_BASE64 = object_with({"media_type": text, "data": text})
_URL = object_with({"url": text})
_FILE = object_with({"file_id": text})
_IMAGE = object_with({"source": discriminated({"base64": _BASE64, "url": _URL, "file": _FILE})})
_TEXTS = discriminated({"text": _TEXT})
_SEARCH_RESULT = object_with({"title": text, "source": text, "content": array(_TEXTS)})
_DOCUMENT = object_with(
    {
        "source": discriminated(
            {
                "base64": _BASE64,
                "text": object_with({"data": text}),
                "url": _URL,
                "file": _FILE,
                "content": object_with(
                    {"content": text_or_parts(discriminated({"text": _TEXT, "image": _IMAGE}))}
                ),
            }
        )
    },
    {"title": text, "context": text},
)
_CONTENT_BLOCKS: Mapping[str, Check] = {
    "text": _TEXT,
    "image": _IMAGE,
    "document": _DOCUMENT,
    "search_result": _SEARCH_RESULT,
}
_RESULT_BLOCKS: Mapping[str, Check] = {
    **_CONTENT_BLOCKS,
    "tool_reference": object_with({"tool_name": text}),
}
_RESULT = object_with(
    {"tool_use_id": text},
    {
        "is_error": boolean,
        "content": text_or_parts(discriminated(_RESULT_BLOCKS)),
    },
)
_USER_BLOCKS: Mapping[str, Check] = {
    **_CONTENT_BLOCKS,
    "tool_result": _RESULT,
    "container_upload": _FILE,
}
_ASSISTANT_BLOCKS: Mapping[str, Check] = {
    "text": _TEXT,
    "tool_use": object_with({"id": text, "name": text, "input": mapping}),
    "compaction": fields({"content": text}),
}
_SYSTEM = text_or_parts(_TEXTS)
_CONTENTS: Mapping[str, Check] = {
    "user": text_or_parts(discriminated(_USER_BLOCKS), minimum=1),
    # Thinking and the results of server tools have many types; they are not read.
    "assistant": text_or_parts(discriminated(_ASSISTANT_BLOCKS, others=anything)),
    "system": _SYSTEM,
}


def _message(value: Any, param: str) -> None:
    """Check one message."""
    mapping(value, param)
    require(value, "role", f"{param}.role")
    one_of(*_CONTENTS)(value["role"], f"{param}.role")
    require(value, "content", f"{param}.content")
    _CONTENTS[value["role"]](value["content"], f"{param}.content")


_THINKING = discriminated(
    {
        "enabled": fields({"budget_tokens": integer(1), "display": text}),
        "adaptive": fields({"display": text}),
        "between_tools": anything,
        "disabled": anything,
    }
)
_PARALLEL = fields({"disable_parallel_tool_use": boolean})
_TOOL_CHOICE = discriminated(
    {
        "auto": _PARALLEL,
        "any": _PARALLEL,
        "tool": object_with({"name": text}, {"disable_parallel_tool_use": boolean}),
        "none": anything,
    }
)
_FORMAT = discriminated({"json_schema": object_with({"schema": mapping})})
_EFFORTS = one_of("low", "medium", "high", "xhigh", "max")
_FIELDS: Mapping[str, Check] = {
    "model": text,
    "max_tokens": integer(1),
    "messages": array(_message, minimum=1),
    "system": _SYSTEM,
    "stop_sequences": array(text),
    "stream": boolean,
    "temperature": number(0, 1),
    "top_p": number(0, 1),
    "top_k": integer(0),
    "metadata": fields({"user_id": text}),
    "service_tier": one_of("auto", "standard_only"),
    "thinking": _THINKING,
    "tool_choice": _TOOL_CHOICE,
    "tools": array(mapping),
    "output_config": fields({"effort": _EFFORTS, "format": _FORMAT}),
    "output_format": _FORMAT,
    "container": text_or_object(fields({"id": text})),
    "mcp_servers": array(mapping),
    "thread": object_with({"type": one_of("create", "continue")}, {"previous_message_id": text}),
    "compaction": mapping,
    "sandbox": mapping,
}


def _check_fields(body: Mapping[str, Any], required: Collection[str]) -> None:
    """Raise BadRequestError for the first field that is missing or invalid."""
    for name in required:
        require(body, name, name)
    for name, of in _FIELDS.items():
        if body.get(name) is not None or name in required:
            of(body[name], name)


# Translation

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields that chat completions have under the same name."""
_HINTS = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
    *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token"),
)
"""Fields that only Anthropic's servers use and that no answer depends on; they are dropped."""
_NOT_SERVED = {"mcp_servers": "MCP servers", "compaction": "Compactions"}
"""Fields that an answer depends on; they are refused."""
_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
"""The fields by which vLLM and SGLang continue the answer that a last assistant message begins."""
_TIERS = {"auto": "auto", "standard_only": "default"}


@dataclass(frozen=True, slots=True)
class MessagesAsChat:
    """A request as a chat completion."""

    chat: Mapping[str, Any]
    names: Mapping[str, str]
    """Paths in `chat`, and the paths of the same values in the request."""
    own_tools: Sequence[Tool]
    """The client's tools, each with its schema."""
    code_execution: bool
    """Whether the request has the code execution tool, for which the sandbox stands."""
    tool_first: bool
    """Whether the run must begin with a tool call, which may be one of the sandbox's."""
    thinking: bool
    """Whether the client wants to see the model's thinking."""
    stop_sequences: tuple[str, ...]

    def translate_error(self, error: ProxyError) -> ProxyError:
        """Return an error with the path of the client's request instead of the path in `chat`."""
        param = error.param or ""
        for place, own in self.names.items():
            if param == place or param.startswith(f"{place}."):
                error.message = error.message.replace(param, own)
                error.param = own
                return error
        return error


def as_chat(body: Mapping[str, Any]) -> MessagesAsChat:
    """Return the chat completion for a request. Raises BadRequestError."""
    return _as_chat(body, ("model", "max_tokens", "messages"))


def as_chat_to_count(body: Mapping[str, Any]) -> MessagesAsChat:
    """Return the chat completion for a request to count tokens. Raises BadRequestError."""
    return _as_chat(body, ("model", "messages"))


def _as_chat(body: Mapping[str, Any], required: tuple[str, ...]) -> MessagesAsChat:
    _check_fields(body, required)
    given = {name: value for name, value in body.items() if value is not None}
    for name, words in _NOT_SERVED.items():
        if given.get(name):
            raise BadRequestError(f"{words} are not served here.", param=name)
    if given.get("thread", {}).get("type") == "continue":
        raise ProxyError(
            "The thread is not kept here: send all of its messages.",
            status=404,
            type="invalid_request_error",
            code=LOST_THREAD,
            param="thread.previous_message_id",
        )
    if all(turn["role"] == SYSTEM for turn in given["messages"]):
        raise BadRequestError("At least one message of the user is needed.", param="messages")
    tools = read_tools(given.get("tools", []))
    translated = to_chat_messages(given.get("system"), given["messages"])
    thinking = given.get("thinking", {"type": "disabled"})
    choice = given.get("tool_choice", {})
    return MessagesAsChat(
        chat={
            **{name: given[name] for name in _SAME if name in given},
            **params_for(_unknown(given), "every call"),
            "messages": translated.messages,
            **_parameters(given),
            **(_CONTINUED if translated.messages[-1]["role"] == "assistant" else {}),
            **_tools(given, tools),
            **_extension(given),
        },
        names=translated.places,
        own_tools=tools.own,
        code_execution=tools.code_execution,
        tool_first=tools.code_execution
        and (choice.get("type") == "any" or choice.get("name") == CODE_EXECUTION),
        thinking=thinking["type"] != "disabled" and thinking.get("display") != "omitted",
        stop_sequences=tuple(given.get("stop_sequences", ())),
    )


def _unknown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the backend may know, which travel on unchanged."""
    return {name: given[name] for name in given if name not in _FIELDS and name not in _HINTS}


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that have another name in a chat completion."""
    told: dict[str, Any] = {}
    if given.get("stop_sequences"):
        told["stop"] = given["stop_sequences"]
    if user := given.get("metadata", {}).get("user_id"):
        told["user"] = user
    if "service_tier" in given:
        told["service_tier"] = _TIERS[given["service_tier"]]
    output = given.get("output_config", {})
    if output.get("effort"):
        told["reasoning_effort"] = output["effort"]
    if form := output.get("format") or given.get("output_format"):
        named = {"name": "answer", "schema": form["schema"], "strict": True}
        told["response_format"] = {"type": "json_schema", "json_schema": named}
    return told


def _tools(given: Mapping[str, Any], tools: MessagesToolSet) -> dict[str, Any]:
    told: dict[str, Any] = {"tools": [chat_tool(tool) for tool in tools.own]} if tools.own else {}
    if "tool_choice" in given:
        told |= chat_tool_choice(given["tool_choice"], tools)
    return told


def _extension(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `sandbox` field, with `container` as its container_id."""
    ours = given.get("sandbox", {})
    container = given.get("container", {})
    named = container if isinstance(container, str) else container.get("id")
    if not isinstance(container, str) and container.get("skills"):
        raise BadRequestError("Skills are not served here.", param="container.skills")
    if named:
        ours = {"container_id": named, **ours}
    return {"sandbox": ours} if ours else {}


def to_be_counted(body: Mapping[str, Any], asked: MessagesAsChat) -> dict[str, Any]:
    """Return the request as other servers accept it: each tool with its schema."""
    others = {name: value for name, value in body.items() if name not in ("sandbox", "tools")}
    return {**others, "tools": list(asked.own_tools)} if asked.own_tools else others
