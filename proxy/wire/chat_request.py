"""POST /v1/chat/completions: what we read of a request; every other field travels on untouched."""

from collections.abc import Mapping
from typing import Any

from proxy.agent.task import Outbox, Task
from proxy.errors import BadRequestError

OURS = frozenset({"model", "messages", "sandbox", "stream", "stream_options", "n"})
"""Read here and never sent on as they are."""
LOOP_OWNED = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"}
)
"""What the loop decides for each call itself."""
GRAMMARS = frozenset(
    {
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "regex",
        "ebnf",
    }
)
"""What holds the visible answer to a form that leaves no room for links."""
FINAL_ONLY = GRAMMARS | frozenset(
    {
        "response_format",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logit_bias",
        "echo",
        "return_token_ids",
        "prediction",
    }
)
"""What shapes the visible answer and would spoil a tool turn (a backend that decodes under a
grammar cannot call tools)."""
RESERVED_TOOLS = frozenset({"execute_bash", "str_replace_editor", "submit"})
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")


def check(body: object) -> dict[str, Any]:
    """The body, if it is a chat-completions request. Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    _require(body, "model", str, "a string")
    messages = _require(body, "messages", list, "an array of messages")
    if not messages:
        raise BadRequestError(
            "Invalid 'messages': empty array. Expected at least one message.",
            param="messages",
            code="empty_array",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            param = f"messages[{index}]"
            raise BadRequestError(f"Invalid '{param}': an object with a 'role'.", param=param)
    _optional(body, "stream", bool, "a boolean")
    _optional(body, "stream_options", dict, "an object")
    _optional(body.get("stream_options") or {}, "include_usage", bool, "a boolean")
    _optional(body, "sandbox", dict, "an object")
    for name in TOKEN_LIMITS:
        _optional(body, name, int, "an integer")
    _optional(body, "tools", list, "an array of tools")
    _optional(body, "n", int, "an integer")
    return body


def to_task(body: Mapping[str, Any], *, model: str, run_id: str, outbox: Outbox) -> Task:
    """A checked request as the agent's task. Raises BadRequestError."""
    tools = body.get("tools") or []
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    if body.get("n") not in (None, 1):
        raise BadRequestError(
            "'n' other than 1 is not supported with a sandbox; use the model with ':plain'.",
            param="n",
            code="unsupported_value",
        )
    given = {key: value for key, value in body.items() if value is not None}
    final_only = {key: value for key, value in given.items() if key in FINAL_ONLY}
    if not any(_shapes(key, value) for key, value in final_only.items()):
        final_only = {}
    return Task(
        run_id=run_id,
        outbox=outbox,
        model=model,
        messages=body["messages"],
        client_tools=tools,
        tool_choice=body.get("tool_choice"),
        parallel_tool_calls=body.get("parallel_tool_calls") if tools else None,
        every_turn={
            key: value
            for key, value in body.items()
            if key not in OURS and key not in LOOP_OWNED and key not in FINAL_ONLY
        },
        final_only=final_only,
        final_budget={key: given[key] for key in TOKEN_LIMITS if key in given},
        stream=bool(body.get("stream")),
        rewrite_links=_is_text(body.get("response_format")) and not _is_structured(given),
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a streaming client asked for the usage chunk."""
    options = body.get("stream_options") or {}
    return bool(options.get("include_usage"))


def _shapes(key: str, value: object) -> bool:
    """Whether a parameter changes anything; many clients send the defaults along."""
    return bool(value) and not (key == "response_format" and _is_text(value))


def _is_text(response_format: object) -> bool:
    return not isinstance(response_format, dict) or response_format.get("type") == "text"


def _is_structured(given: Mapping[str, Any]) -> bool:
    return any(key in given for key in GRAMMARS)


def _check_tool(tool: object, param: str) -> None:
    name = None
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        name = tool["function"].get("name")
    if not isinstance(name, str) or not name:
        raise BadRequestError(
            f"Invalid '{param}': a function tool with a name.", param=f"{param}.function.name"
        )
    if name in RESERVED_TOOLS:
        raise BadRequestError(
            f"The tool name {name!r} is reserved for the sandbox; rename the tool or use the model"
            " with ':plain'.",
            param=f"{param}.function.name",
        )


def _require(body: Mapping[str, Any], key: str, kind: type, words: str) -> Any:
    if key not in body:
        raise BadRequestError(
            f"Missing required parameter: '{key}'.", param=key, code="missing_required_parameter"
        )
    return _typed(body, key, kind, words)


def _optional(body: Mapping[str, Any], key: str, kind: type, words: str) -> None:
    if body.get(key) is not None:
        _typed(body, key, kind, words)


def _typed(body: Mapping[str, Any], key: str, kind: type, words: str) -> Any:
    value = body[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequestError(
            f"Invalid type for '{key}': expected {words}, but got {type(value).__name__} instead.",
            param=key,
            code="invalid_type",
        )
    return value
