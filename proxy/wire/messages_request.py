"""POST /v1/messages: Anthropic's request as the chat completion that asks for the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import BadRequestError, ProxyError
from proxy.wire.messages_input import SYSTEM, talk_of
from proxy.wire.messages_errors import LOST_THREAD
from proxy.wire.messages_shapes import FIELDS, check_fields
from proxy.wire.messages_tools import (
    CODE_EXECUTION,
    Offered,
    Tool,
    chat_tool,
    chat_tool_choice,
    offered,
)
from proxy.wire.chat_parameters import placed

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields that chat completions and their backends have under the same name."""
_HINTS = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
    *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token"),
)
"""What only Anthropic's own servers can do something with, and nobody misses in an answer."""
_NOT_SERVED = {"mcp_servers": "MCP servers", "compaction": "Compactions"}
"""What would be missed: whole messages, or all of the answer."""
_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
"""How vLLM and SGLang are asked to go on with a begun answer, which no loop could."""
_TIERS = {"auto": "auto", "standard_only": "default"}


@dataclass(frozen=True, slots=True)
class AsChat:
    """A request as a chat completion."""

    chat: Mapping[str, Any]
    names: Mapping[str, str]
    """Places in it, and what the client calls them."""
    own_tools: Sequence[Tool]
    """The client's, each with its schema."""
    code_execution: bool
    """Whether it names a computer of the server's among its tools."""
    tool_first: bool
    """Whether the run is to begin with a tool, be it the computer."""
    thinking: bool
    """Whether it wants to see what the model thinks."""
    stop_sequences: tuple[str, ...]

    def in_own_words(self, error: ProxyError) -> ProxyError:
        """An error that names the client's own place."""
        param = error.param or ""
        for place, own in self.names.items():
            if param == place or param.startswith(f"{place}."):
                error.message = error.message.replace(param, own)
                error.param = own
                return error
        return error


def as_chat(body: Mapping[str, Any]) -> AsChat:
    """The chat completion that answers it. Raises BadRequestError."""
    return _as_chat(body, ("model", "max_tokens", "messages"))


def as_chat_to_count(body: Mapping[str, Any]) -> AsChat:
    """The chat completion whose tokens are to be counted. Raises BadRequestError."""
    return _as_chat(body, ("model", "messages"))


def _as_chat(body: Mapping[str, Any], required: tuple[str, ...]) -> AsChat:
    check_fields(body, required)
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
    tools = offered(given.get("tools", []))
    talk = talk_of(given.get("system"), given["messages"])
    thinking = given.get("thinking", {"type": "disabled"})
    return AsChat(
        chat={
            **{name: given[name] for name in _SAME if name in given},
            **placed(_unknown(given), "every call"),
            "messages": talk.messages,
            **_parameters(given),
            **(_CONTINUED if talk.messages[-1]["role"] == "assistant" else {}),
            **_tools(given, tools),
            **_extension(given),
        },
        names=talk.places,
        own_tools=tools.own,
        code_execution=tools.code_execution,
        tool_first=tools.code_execution and _calls_first(given.get("tool_choice", {})),
        thinking=thinking["type"] != "disabled" and thinking.get("display") != "omitted",
        stop_sequences=tuple(given.get("stop_sequences", ())),
    )


def _calls_first(choice: Mapping[str, Any]) -> bool:
    return choice.get("type") == "any" or choice.get("name") == CODE_EXECUTION


def _unknown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the backend's own, which are carried."""
    return {name: given[name] for name in given if name not in FIELDS and name not in _HINTS}


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that have other names there."""
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


def _tools(given: Mapping[str, Any], tools: Offered) -> dict[str, Any]:
    told: dict[str, Any] = {"tools": [chat_tool(tool) for tool in tools.own]} if tools.own else {}
    if "tool_choice" in given:
        told |= chat_tool_choice(given["tool_choice"], tools)
    return told


def _extension(given: Mapping[str, Any]) -> dict[str, Any]:
    """The proxy's own field, and the container, which is the same as one that it names."""
    ours = given.get("sandbox", {})
    container = given.get("container", {})
    named = container if isinstance(container, str) else container.get("id")
    if not isinstance(container, str) and container.get("skills"):
        raise BadRequestError("Skills are not served here.", param="container.skills")
    if named:
        ours = {"container_id": named, **ours}
    return {"sandbox": ours} if ours else {}


def to_be_counted(body: Mapping[str, Any], asked: AsChat) -> dict[str, Any]:
    """The request as other servers of this dialect take it: every tool with its schema."""
    others = {name: value for name, value in body.items() if name not in ("sandbox", "tools")}
    return {**others, "tools": list(asked.own_tools)} if asked.own_tools else others
