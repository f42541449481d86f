"""Errors of invalid requests to Anthropic's API."""

from typing import Any

import pytest

from proxy.errors import BadRequestError, ProxyError, anthropic_error_body
from proxy.schemas.messages_request import as_chat, as_chat_for_token_count

HELLO = [{"role": "user", "content": "Hello."}]
WARMTH = {"name": "warmth", "input_schema": {"type": "object"}}


def error_message(**body: Any) -> str:
    with pytest.raises(BadRequestError) as caught:
        as_chat({"model": "m", "max_tokens": 10, "messages": HELLO, **body})
    message: str = anthropic_error_body(caught.value, "req_1")["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        ({"max_tokens": 0}, "Invalid 'max_tokens': integer below minimum value."),
        ({"temperature": 1.5}, "Invalid 'temperature': decimal above maximum value."),
        ({"messages": []}, "Invalid 'messages': empty array."),
        (
            {"messages": [{"role": "system", "content": ""}]},
            "messages: At least one message of the user is needed.",
        ),
        (
            {"messages": [{"role": "user", "content": []}]},
            "Invalid 'messages.0.content': empty array.",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (
            {"messages": [{"role": "tool", "content": ""}]},
            "messages.0.role: Invalid value: 'tool'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.source: Field required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0.type: Invalid value: 'video'. Supported values are:",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "Invalid type for 'messages.0.content.0.text': expected a string, but got null",
        ),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: Field required"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type: The server tool 'web_search_20250305' is not served here.",
        ),
        ({"tools": [{"type": "computer_toolset_20260801"}]}, "tools.0.type: The server tool"),
        (
            {"tools": [{**WARMTH, "allowed_callers": ["code"]}]},
            "tools.0.allowed_callers: Tools that only code",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "a"}},
            "tool_choice.name: Tool 'a' not found in provided tools.",
        ),
        ({"thinking": {"type": "much"}}, "thinking.type: Invalid value: 'much'."),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers: MCP servers are not served here."),
        ({"thread": {"type": "join"}}, "thread.type: Invalid value: 'join'."),
        ({"compaction": {"type": "enabled"}}, "compaction: Compactions are not served here."),
        (
            {"container": {"skills": [{"type": "anthropic"}]}},
            "container.skills: Skills are not served here.",
        ),
    ],
)
def test_error_for_an_invalid_messages_request_names_the_path(body: Any, beginning: str) -> None:
    assert error_message(**body).startswith(beginning)


def test_request_that_continues_a_thread_is_refused_with_404() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO}
    assert as_chat({**body, "thread": {"type": "create"}}).chat == as_chat(body).chat
    with pytest.raises(ProxyError) as caught:
        as_chat({**body, "thread": {"type": "continue", "previous_message_id": "msg_1"}})
    error = anthropic_error_body(caught.value, "r")["error"]
    assert (caught.value.status, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}


def test_max_tokens_is_required_except_for_token_counts() -> None:
    body = {"model": "m", "messages": HELLO}
    with pytest.raises(BadRequestError) as caught:
        as_chat(body)
    assert (
        anthropic_error_body(caught.value, "r")["error"]["message"] == "max_tokens: Field required"
    )
    assert "max_tokens" not in as_chat_for_token_count(body).chat
