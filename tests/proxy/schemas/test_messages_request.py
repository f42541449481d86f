"""Translation of Anthropic's requests into chat completions."""

import json
from typing import Any

import pytest

from policies.history import UNANSWERED
from proxy.schemas.messages_request import as_chat, as_chat_for_token_count, token_count_request

BASE: dict[str, Any] = {"model": "m", "max_tokens": 10}
WARMTH = {"name": "warmth", "input_schema": {"type": "object"}}
WARMTH_USE = {"type": "tool_use", "id": "toolu_1", "name": "warmth", "input": {}}


def chat(**body: Any) -> Any:
    request = {**BASE, "messages": [{"role": "user", "content": "Hello."}], **body}
    return as_chat(request).chat


def translated(*content: Any, role: str = "user") -> Any:
    """Return the chat messages for a message with these blocks."""
    message = {"role": role, "content": list(content)}
    other = {"role": "assistant" if role == "user" else "user", "content": "?"}
    last = [other] if role == "assistant" else []
    found = chat(messages=[other, message, *last])["messages"]
    return found[1:-1] if last else found[1:]


def test_request_with_system_and_sampling_parameters_becomes_a_chat_completion_request() -> None:
    assert chat(system="Be brief.", temperature=0.5, top_p=0.9, top_k=4, stream=True) == {
        **BASE,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stream": True,
    }


def test_known_parameters_are_renamed_and_unknown_parameters_are_kept() -> None:
    schema = {"type": "object"}
    found = chat(
        stop_sequences=["Two"],
        metadata={"user_id": "u"},
        service_tier="standard_only",
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        min_p=0.1,
    )
    del found["messages"]
    named = {"name": "answer", "schema": schema, "strict": True}
    assert found == {
        **BASE,
        "stop": ["Two"],
        "user": "u",
        "service_tier": "default",
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": named},
        "min_p": 0.1,
    }


def test_fields_that_only_anthropics_servers_use_are_dropped() -> None:
    found = chat(
        cache_control={"type": "ephemeral"},
        context_management={"edits": []},
        speed="fast",
        fallbacks="default",
        billing_policy={"type": "billing_policy"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        n=3,
    )
    assert set(found) == {"model", "max_tokens", "messages"}


def test_system_blocks_are_joined() -> None:
    blocks = [{"type": "text", "text": "A", "cache_control": {}}, {"type": "text", "text": "B"}]
    assert chat(system=blocks)["messages"][0] == {"role": "system", "content": "A\n\nB"}


def test_billing_header_of_claude_code_is_dropped() -> None:
    billing_header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.db9;"}
    found = chat(system=[billing_header, {"type": "text", "text": "A"}])
    assert found["messages"][0] == {"role": "system", "content": "A"}


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
            },
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}},
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
            {"type": "input_image", "file_id": "file-1"},
        ),
        (
            {
                "type": "document",
                "title": "a.pdf",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="},
            },
            {
                "type": "file",
                "file": {"file_data": "data:application/pdf;base64,QQ==", "filename": "a.pdf"},
            },
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
            {"type": "file", "file": {"file_url": "https://a/b.pdf"}},
        ),
        (
            {"type": "document", "source": {"type": "file", "file_id": "file-1"}},
            {"type": "file", "file": {"file_id": "file-1"}},
        ),
        (
            {"type": "container_upload", "file_id": "file-1"},
            {"type": "file", "file": {"file_id": "file-1"}},
        ),
    ],
)
def test_file_blocks_become_content_parts_of_a_chat_message(block: Any, part: Any) -> None:
    text = {"type": "text", "text": "Look."}
    assert translated(block, text) == [{"role": "user", "content": [part, text]}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "document",
                "title": "Notes",
                "context": "old",
                "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
            },
            "[Document: Notes]\nabc\n\n[About this document: old]",
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "text", "text": "abc"}]},
            },
            "[Document: untitled]\n\nabc",
        ),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "https://a",
                "content": [{"type": "text", "text": "abc"}],
            },
            "[Search result: T (https://a)]\nabc",
        ),
    ],
)
def test_document_and_search_result_blocks_become_text(block: Any, text: str) -> None:
    assert translated(block) == [{"role": "user", "content": text}]


def test_client_tool_calls_and_results_are_translated() -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "warmth", "input": {"city": "Bonn"}}
    call = {"name": "warmth", "arguments": '{"city": "Bonn"}'}
    assert translated({"type": "text", "text": "I ask."}, use, role="assistant") == [
        {
            "role": "assistant",
            "content": "I ask.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
    ]
    failed = {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": "no"}
    blocks = [{"type": "text", "text": "21"}, {"type": "tool_reference", "tool_name": "x"}]
    done = {"type": "tool_result", "tool_use_id": "call_2", "content": blocks}
    assert translated({"type": "text", "text": "And?"}, failed, done) == [
        {"role": "tool", "tool_call_id": "call_1", "content": "The tool failed: no"},
        {"role": "tool", "tool_call_id": "call_2", "content": "21\n[Tool: x]"},
        {"role": "user", "content": "And?"},
    ]


def test_image_of_a_tool_result_follows_in_a_user_message() -> None:
    source = {"type": "url", "url": "https://a/b.png"}
    blocks = [{"type": "text", "text": "Here."}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": blocks}
    assert translated(result) == [
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": "Here.\n[What else it gave follows.]",
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "[From tool call call_1:]"},
                {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
            ],
        },
    ]


def test_thinking_and_server_tool_calls_are_dropped() -> None:
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "$ ls", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look. "},
        {"type": "text", "text": "Now."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "bash_code_execution"},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_1"},
        {"type": "text", "text": "Done."},
    ]
    assert translated(*blocks, role="assistant") == [
        {"role": "assistant", "content": "I look. Now.\n\nDone."}
    ]
    assert translated(*blocks[:2], role="assistant") == [
        {"role": "assistant", "content": UNANSWERED}
    ]


def test_compaction_block_becomes_text() -> None:
    blocks = [{"type": "compaction", "content": "They met."}, {"type": "text", "text": "Go on."}]
    assert translated(*blocks, role="assistant") == [
        {"role": "assistant", "content": "They met.\n\nGo on."}
    ]


def test_system_message_after_the_first_user_message_becomes_user_text() -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A"},
        {"role": "system", "content": [{"type": "text", "text": "It is late."}]},
        {"role": "assistant", "content": [WARMTH_USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
        {"role": "system", "content": "It is later."},
        {"role": "system", "content": ""},
    ]
    first, user, _, result, later = chat(system="Be kind.", messages=turns)["messages"]
    assert first == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert user == {"role": "user", "content": "A\n\n[From the system:]\nIt is late."}
    assert result["role"] == "tool"
    assert later == {"role": "user", "content": "[From the system:]\nIt is later."}


def test_assistant_message_at_the_end_of_a_request_is_continued() -> None:
    turns = [{"role": "user", "content": "As JSON."}, {"role": "assistant", "content": "{"}]
    found = chat(messages=turns)
    assert found["messages"] == turns
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)


def test_consecutive_user_messages_are_joined() -> None:
    turns = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    assert chat(messages=turns)["messages"] == [{"role": "user", "content": "A\n\nB"}]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "warmth"},
            {"tool_choice": {"type": "function", "function": {"name": "warmth"}}},
        ),
    ],
)
def test_tool_choice_is_translated(choice: Any, chosen: Any) -> None:
    found = chat(tools=[WARMTH], tool_choice=choice)
    assert {key: found.get(key) for key in chosen} == chosen


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "code_execution"}])
def test_tool_choice_any_or_code_execution_makes_the_run_start_with_a_tool_call(
    choice: Any,
) -> None:
    computer = {"type": "code_execution_20250825", "name": "code_execution"}
    request = {**BASE, "messages": [{"role": "user", "content": "Hello."}]}
    found = as_chat({**request, "tools": [computer], "tool_choice": choice})
    assert (found.starts_with_tool, found.chat["tool_choice"]) == (True, None)


def test_client_tool_keeps_its_schema_and_examples() -> None:
    tool = {**WARMTH, "description": "D", "strict": True, "input_examples": [{"city": "Bonn"}]}
    (found,) = chat(tools=[tool])["tools"]
    parameters = {"type": "object", "examples": [{"city": "Bonn"}]}
    function = {"name": "warmth", "description": "D", "strict": True, "parameters": parameters}
    assert found == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("tool", "expected_texts"),
    [
        ({"type": "bash_20250124", "name": "bash"}, ["command", "restart"]),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            ["view_range", "insert_line", "str_replace"],
        ),
        ({"type": "text_editor_20250124", "name": "str_replace_editor"}, ["undo_edit"]),
        ({"type": "memory_20250818", "name": "memory"}, ["rename", "old_path"]),
        (
            {
                "type": "computer_20250124",
                "name": "computer",
                "display_width_px": 800,
                "display_height_px": 600,
            },
            ["800 x 600", "triple_click", "start_coordinate"],
        ),
    ],
)
def test_client_tools_that_anthropic_defines_get_a_schema(
    tool: Any, expected_texts: list[str]
) -> None:
    (found,) = chat(tools=[tool])["tools"]
    assert found["function"]["name"] == tool["name"]
    assert all(word in json.dumps(found) for word in expected_texts)


def test_container_field_becomes_the_container_id_of_the_sandbox_field() -> None:
    assert chat(container="cntr_1")["sandbox"] == {"container_id": "cntr_1"}
    assert chat(container={"id": "cntr_1"})["sandbox"] == {"container_id": "cntr_1"}


def test_token_count_request_contains_only_client_tools_with_schemas() -> None:
    computer = {"type": "code_execution_20250825", "name": "code_execution"}
    bash = {"type": "bash_20250124", "name": "bash"}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello."}],
        "tools": [computer, WARMTH, bash],
        "sandbox": {},
    }
    counted = token_count_request(body, as_chat_for_token_count(body))
    assert set(counted) == {"model", "messages", "tools"}
    assert [tool["name"] for tool in counted["tools"]] == ["warmth", "bash"]
    assert all("input_schema" in tool for tool in counted["tools"])
