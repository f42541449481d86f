"""POST /v1/chat/completions: the request and its model parameters, as a run reads them.

The deprecated `functions`, and OpenAI's custom tools, whose input is any text, become function
tools. A field that is not read here is sent to the backend unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from policies.answer_form import requested_form
from policies.sessions import function_call_id, session_state_names, state_names
from proxy.agent.task import ChatRequest, Params
from proxy.errors import BadRequestError, ProxyError
from proxy.schemas.chat_parameters import GRAMMAR_PARAMS, check_parameters, has_effect, params_for
from proxy.schemas.validation import (
    MAX_MESSAGES,
    array,
    check_mapping,
    combination_error,
    integer,
    require_field,
)

TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
"""The fields that limit the tokens of an answer. `n_predict` is a field of llama.cpp; a value below
1 means no limit."""
_GUIDED_NAMES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's former fields, which current versions ignore, and their names in `structured_outputs`."""
_GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The kinds of grammar in `structured_outputs`. vLLM accepts only one kind in a request."""


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError unless the request has messages."""
    require_field(body, "messages", "messages")
    array(check_mapping, minimum=1, maximum=MAX_MESSAGES)(body["messages"], "messages")


def choice_count(body: Mapping[str, Any], limit: int) -> int:
    """Return the number of answers that the request asks for. Raises BadRequestError."""
    count = body.get("n")
    if count is None:
        return 1
    integer(1, limit)(count, "n")
    return int(count)


def parse_chat(
    body: Mapping[str, Any],
    *,
    has_client_indexes: bool = False,
    forces_tool: bool = False,
    max_tool_calls: int | None = None,
) -> tuple[ChatRequest, Params]:
    """Return the request and its model parameters. Raises BadRequestError.

    `has_client_indexes` is True if each message of `body` is the client's message of the same
    index. `forces_tool` is True if the model must call a tool first.
    """
    check_parameters(body)
    legacy_state = None
    if _uses_functions(body):
        legacy_state, _ = session_state_names(body["messages"])
        body = _functions_as_tools(body)
    tools = body.get("tools") or []
    text_tools = frozenset(tool["custom"]["name"] for tool in tools if _is_custom(tool))
    body = _custom_tools_as_functions(body)
    choice = _resolve_tool_choice(body["tools"], body["tool_choice"])
    present = {key: value for key, value in body.items() if value is not None}
    final = _with_structured_outputs(params_for(present, "visible answer"))
    final = {key: value for key, value in final.items() if has_effect(key, value)}
    request = ChatRequest(
        messages=body["messages"],
        has_client_indexes=has_client_indexes,
        client_tools=choice.tools,
        text_tools=text_tools,
        tool_choice="required" if forces_tool else choice.first_choice,
        must_call=choice.must_call,
        parallel_tool_calls=body.get("parallel_tool_calls") if choice.tools else None,
        max_tool_calls=max_tool_calls,
        answer_form=requested_form(
            final.get("response_format"),
            final.get("structured_outputs"),
            final.get("json_schema"),
        ),
        rewrite_links=_is_text(body.get("response_format")) and not GRAMMAR_PARAMS & present.keys(),
        stream=bool(body.get("stream")),
        legacy_state=legacy_state,
    )
    params = Params(
        base=params_for(body, "every call", "straight"),
        final=final,
        token_limits={key: present[key] for key in TOKEN_LIMITS if present.get(key, 0) > 0},
    )
    return request, params


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Return True if `stream_options` asks for the usage chunk. Raises BadRequestError."""
    options = body.get("stream_options") or {}
    check_mapping(options, "stream_options")
    return bool(options.get("include_usage"))


def _with_structured_outputs(final_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with `structured_outputs` in addition to vLLM's former fields, which older
    servers need. Raises BadRequestError."""
    guided = {
        name: final_params[former]
        for former, name in _GUIDED_NAMES.items()
        if final_params.get(former)
    }
    outputs = final_params.get("structured_outputs") or guided
    if sum(outputs.get(kind) not in (None, False) for kind in _GRAMMAR_KINDS) > 1:
        raise combination_error(
            f"An answer can have only one kind of grammar: one of {', '.join(_GRAMMAR_KINDS)}.",
            "structured_outputs",
        )
    return {**final_params, "structured_outputs": outputs} if outputs else dict(final_params)


def _is_text(response_format: object) -> bool:
    return not isinstance(response_format, dict) or response_format.get("type") == "text"


# The deprecated functions


def _uses_functions(body: Mapping[str, Any]) -> bool:
    """Return True if the request has the deprecated `functions`. Raises BadRequestError if the
    request has `tools` too."""
    if not body.get("functions"):
        return False
    if body.get("tools"):
        raise combination_error(
            "'functions' is deprecated and cannot be used together with 'tools'.", "functions"
        )
    return True


def with_tool_call_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with function calls and their results converted to tool calls with ids.
    A result without a call stays unchanged."""
    converted: list[dict[str, Any]] = []
    call_ids: dict[str, str] = {}
    for message, state in zip(messages, state_names(messages), strict=False):
        call, name = message.get("function_call"), message.get("name")
        role = message.get("role")
        if role == "assistant" and isinstance(call, dict):
            id = function_call_id(state, call.get("name"), call.get("arguments"))
            call_ids[str(call.get("name"))] = id
            rest = {key: value for key, value in message.items() if key != "function_call"}
            tool_call = {"id": id, "type": "function", "function": call}
            converted.append({**rest, "tool_calls": [tool_call]})
        elif role == "function" and isinstance(name, str) and name in call_ids:
            content = message.get("content")
            converted.append(
                {"role": "tool", "tool_call_id": call_ids.pop(name), "content": content}
            )
        else:
            converted.append(message)
    return converted


def _functions_as_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with its functions as tools. Parallel calls are disabled, because an
    answer has only one `function_call`. Raises BadRequestError for an unknown function."""
    choice = body.get("function_call")
    if isinstance(choice, dict):
        if all(function["name"] != choice["name"] for function in body["functions"]):
            raise BadRequestError(
                f"Invalid value for 'function_call': no function named {choice['name']!r} was"
                " specified in the 'functions' parameter.",
                param="function_call.name",
            )
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return {
        **body,
        "messages": with_tool_call_ids(body["messages"]),
        "tools": [{"type": "function", "function": each} for each in body["functions"]],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }


# Custom tools, which the model sees as functions with one string argument

_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _custom_tools_as_functions(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with functions in place of custom tools, in its history too."""
    return {
        **body,
        "messages": [_with_function_calls(message) for message in body["messages"]],
        "tools": [
            _custom_tool_as_function(tool["custom"]) if _is_custom(tool) else tool
            for tool in body.get("tools") or []
        ],
        "tool_choice": _function_choice(body.get("tool_choice")),
    }


def _custom_tool_as_function(custom_tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function. A grammar becomes part of the description, because the
    proxy does not enforce the grammar."""
    description = custom_tool.get("description")
    match custom_tool.get("format"):
        case {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}:
            grammar = f"Its input must be as this grammar says ({syntax}):\n{definition}"
            description = f"{description or ''}\n\n{grammar}".strip()
    described = {} if description is None else {"description": description}
    function = {"name": custom_tool["name"], **described, "parameters": _CUSTOM_PARAMETERS}
    return {"type": "function", "function": function}


def _with_function_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(map(_is_custom, calls)):
        return message
    converted = [_function_call(call) if _is_custom(call) else call for call in calls]
    return {**message, "tool_calls": converted}


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    custom = call["custom"]
    function = {"name": custom["name"], "arguments": json.dumps({"input": custom["input"]})}
    return {"id": call.get("id"), "type": "function", "function": function}


def _function_choice(choice: Any) -> Any:
    """Return a `tool_choice` with functions in place of custom tools."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return _as_function_if_custom(choice)
    allowed = choice["allowed_tools"]
    tools = [_as_function_if_custom(tool) for tool in allowed["tools"]]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def _as_function_if_custom(tool: Any) -> Any:
    return {"type": "function", "function": tool["custom"]} if _is_custom(tool) else tool


def _is_custom(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("type") == "custom"
        and isinstance(value.get("custom"), dict)
    )


# The choice of a tool

_Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _ToolChoice:
    """The tools and the tool choice of a run, from checked `tools` and `tool_choice`."""

    tools: _Tools
    """The tools that the model sees."""
    first_choice: Any
    """The `tool_choice` of the first model call."""
    must_call: bool
    """True if the run must end with a call of one of the tools."""


def _resolve_tool_choice(tools: _Tools, choice: Any) -> _ToolChoice:
    """Return the tools that the model sees, and its choice among them. Raises BadRequestError for a
    choice of an unknown tool."""
    if choice == "required" and tools:
        return _ToolChoice(tools, None, must_call=True)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            names = [_function_name(tool) for tool in allowed]
            _check_names(names, tools, "tool_choice.allowed_tools.tools")
            remaining = [tool for tool in tools if _function_name(tool) in names]
            return _ToolChoice(remaining, None, must_call=mode == "required" and bool(remaining))
        case {"type": "function"}:
            _check_names([_function_name(choice)], tools, "tool_choice.function.name")
    return _ToolChoice(tools, choice, must_call=False)


def _check_names(names: Sequence[str], tools: _Tools, param: str) -> None:
    known = {_function_name(tool) for tool in tools}
    for name in names:
        if name not in known:
            raise BadRequestError(
                f"Invalid value for 'tool_choice': no function named {name!r} was specified in the"
                " 'tools' parameter.",
                param=param,
            )


def _function_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else ""


@dataclass(slots=True)
class ChatMessages:
    """The chat messages that a translation has built so far."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    param_paths: dict[str, str] = field(default_factory=dict)
    """Maps paths such as `messages[0]` to the paths of the same values in the client's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTranslation:
    """A request of another API (Responses, Messages), translated to the body of a chat-completions
    request."""

    keeps_param_suffix: ClassVar[bool] = True
    """`param_paths` maps the beginning of an error's path. True if the rest of the path is the same
    in the client's request."""

    chat: Mapping[str, Any]
    param_paths: Mapping[str, str]
    """Maps paths in `chat` to the paths of the same values in the client's request."""
    starts_with_tool: bool = False
    """True if the run must begin with a tool call. A call of a sandbox tool counts too."""

    def restore_param(self, error: ProxyError) -> None:
        """Change an error that names a path in `chat`, so that it names the path of the same value
        in the client's request."""
        param = error.param or ""
        for chat_path, path in self.param_paths.items():
            if param == chat_path or param.startswith((f"{chat_path}.", f"{chat_path}[")):
                if self.keeps_param_suffix:
                    error.message = error.message.replace(f"'{chat_path}", f"'{path}")
                    error.param = path + param.removeprefix(chat_path)
                else:
                    error.message = error.message.replace(param, path)
                    error.param = path
                return
