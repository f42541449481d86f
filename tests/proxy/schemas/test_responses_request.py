"""Checks of /v1/responses requests, and their translation into chat completions."""

from typing import Any

import pytest

from proxy.errors import BadRequestError, NotFoundError
from proxy.schemas.responses_parameters import FIELDS
from proxy.schemas.responses_request import as_chat, input_items
from proxy.schemas.validation import check_request_body, check_text
from tests.openapi.description import described, field_names

PICTURE = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "low"}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "lookup", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
TEXT_PARTS = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
OUTPUT_TEXT = [{"type": "output_text", "text": "Yes.", "annotations": []}]
SHELL_CALL = {"type": "shell_call", "call_id": "step_1_1", "action": {"commands": ["ls"]}}
MCP = {"type": "mcp", "server_label": "x"}
MISSING = "missing_required_parameter"
SHELL_OUTPUT = {"type": "shell_call_output", "call_id": "step_1_1", "output": []}


def chat(**fields: Any) -> dict[str, Any]:
    return as_chat({"model": "m", "input": "Hello.", **fields}).chat


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "ours"}, fields]}


@described
def test_every_field_of_openais_responses_request_schema_is_known() -> None:
    assert field_names("CreateResponse") - set(FIELDS) == set()


def test_fields_that_only_openais_servers_use_are_dropped() -> None:
    input_: dict[str, Any] = {"background_options": {}, "access_programs": {}, "image": {}}
    assert set(chat(**input_)) == set(chat())


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "invalid_type"),
        ({"input": 7}, "input", "invalid_type"),
        ({"input": [7]}, "input[0]", "invalid_type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "odd"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"role": "user", "content": "", "id": {}}]}, "input[0].id", "invalid_type"),
        ({"input": [{"type": "reasoning", "id": [1]}]}, "input[0].id", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{**PICTURE, "image_url": {}}]}]},
            "input[0].content[0].image_url",
            "invalid_type",
        ),
        ({"input": [{**FUNCTION_CALL, "name": 1}]}, "input[0].name", "invalid_type"),
        (
            {"input": [{"type": "function_call_output", "output": ""}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"instructions": 7}, "instructions", "invalid_type"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"max_tool_calls": 0}, "max_tool_calls", "integer_below_min_value"),
        ({"include": ["odd"]}, "include[0]", "invalid_value"),
        ({"text": {"verbosity": "odd"}}, "text.verbosity", "invalid_value"),
        ({"text": {"format": {"type": "odd"}}}, "text.format.type", "invalid_value"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}},
            "text.format.schema",
            None,
        ),
        ({"reasoning": {"effort": "odd"}}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"summary": "odd"}}, "reasoning.summary", "invalid_value"),
        ({"truncation": "odd"}, "truncation", "invalid_value"),
        ({"tool_choice": "odd"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value"),
        (tool(), "tools[1].type", "missing_required_parameter"),
        (tool(type="file_search"), "tools[1].type", "invalid_value"),
        (tool(type="mcp", server_label="x"), "tools[1].type", "invalid_value"),
        (tool(type="image_generation"), "tools[1].type", "invalid_value"),
        (tool(type="function"), "tools[1].name", "missing_required_parameter"),
        (tool(type="function", name=""), "tools[1].name", "invalid_value"),
        (tool(type="function", name="a", parameters=[]), "tools[1].parameters", "invalid_type"),
        (tool(type="code_interpreter"), "tools[1].container", "missing_required_parameter"),
        (
            tool(type="code_interpreter", container={"type": "odd"}),
            "tools[1].container.type",
            "invalid_value",
        ),
        (
            tool(type="shell", environment={"type": "local", "skills": [{}]}),
            "tools[1].environment.skills",
            "unsupported_parameter",
        ),
        (
            tool(type="shell", environment={"type": "container_reference"}),
            "tools[1].environment.container_id",
            "missing_required_parameter",
        ),
        (
            tool(type="shell", environment={"type": "container_auto", "skills": [{}]}),
            "tools[1].environment.skills",
            "unsupported_parameter",
        ),
        (
            tool(type="shell", environment={"type": "container_auto", "memory_limit": "2g"}),
            "tools[1].environment.memory_limit",
            "invalid_value",
        ),
        (
            tool(type="custom", name="a", format={"type": "grammar"}),
            "tools[1].format.syntax",
            "missing_required_parameter",
        ),
        (tool(type="namespace", name="a", description=""), "tools[1].tools", MISSING),
        (
            tool(type="namespace", name="a", description="", tools=[{"type": "shell"}]),
            "tools[1].tools[0].type",
            "invalid_value",
        ),
        (tool(type="tool_search", execution="odd"), "tools[1].execution", "invalid_value"),
        (
            {"input": [{"type": "additional_tools", "role": "developer", "tools": [MCP]}]},
            "input[0].tools[0].type",
            "invalid_value",
        ),
        ({"input": [{"type": "tool_search_output"}]}, "input[0].tools", MISSING),
        ({"input": [{"type": "shell_call", "call_id": "a"}]}, "input[0].action", MISSING),
        (
            {"input": [{"type": "local_shell_call_output", "output": "a"}]},
            "input[0].call_id",
            MISSING,
        ),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"response_format": {"type": "text"}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
    ],
)
def test_invalid_responses_parameter_is_refused_with_openais_param_and_code(
    body: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**body)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert f"'{param}'" in caught.value.message or code in ("invalid_value", None)


@pytest.mark.parametrize(("body", "param"), [([], None), ({"input": "x"}, "model")])
def test_body_that_is_not_an_object_with_a_model_is_refused(body: Any, param: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_request_body(body, model=check_text)
    assert caught.value.param == param


def test_reference_to_an_unknown_item_is_refused_as_not_found() -> None:
    with pytest.raises(NotFoundError, match=r"Item with id 'msg_1' not found\."):
        chat(input=[{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize(
    ("input_", "messages"),
    [
        ("Hello.", [{"role": "user", "content": "Hello."}]),
        ([{"role": "user", "content": "Hi."}], [{"role": "user", "content": "Hi."}]),
        (
            [{"type": "message", "role": "user", "content": TEXT_PARTS}],
            [{"role": "user", "content": "one\ntwo"}],
        ),
        (
            [{"role": "user", "content": [*TEXT_PARTS, PICTURE]}],
            [{"role": "user", "content": [*TEXT_PARTS, PICTURE]}],
        ),
        (
            [{"role": "assistant", "content": OUTPUT_TEXT}],
            [{"role": "assistant", "content": "Yes."}],
        ),
        (
            [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}],
            [{"role": "system", "content": "a\n\nb"}],
        ),
        (
            [
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "item_reference", "id": "rs_2"},
                SHELL_CALL,
                SHELL_OUTPUT,
            ],
            [],
        ),
        (
            [
                {"role": "assistant", "content": OUTPUT_TEXT},
                FUNCTION_CALL,
                {**FUNCTION_CALL, "call_id": "b"},
                RESULT,
            ],
            [
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "tool_calls": [
                        {
                            "id": id,
                            "type": "function",
                            "function": {"name": "lookup", "arguments": "{}"},
                        }
                        for id in ("call_1", "b")
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "42"},
            ],
        ),
    ],
)
def test_input_items_become_chat_messages(input_: Any, messages: list[Any]) -> None:
    assert chat(input=input_)["messages"] == messages


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_empty_call_id_is_kept(kind: str) -> None:
    item = {"type": kind, "call_id": "", "output": "42"}
    assert chat(input=[item])["messages"] == [{"role": "tool", "tool_call_id": "", "content": "42"}]


def test_instructions_and_system_messages_are_joined() -> None:
    input_ = [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    assert chat(instructions="a", input=input_)["messages"] == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
    ]


def test_known_parameters_are_renamed_and_unknown_parameters_are_kept() -> None:
    schema = {"type": "object"}
    body = chat(
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        max_output_tokens=99,
        include=["message.output_text.logprobs"],
        store=True,
        truncation="auto",
        top_k=5,
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": None}],
        tool_choice={"type": "function", "name": "f"},
    )
    del body["messages"]
    assert body == {
        "model": "m",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
        "reasoning_effort": "low",
        "max_completion_tokens": 99,
        "logprobs": True,
        "top_k": 5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "sandbox": {},
    }


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        ("required", [{"type": "function", "name": "f"}], "required"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "c"}],
            },
            [{"type": "custom", "name": "c"}],
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "c"}}],
                },
            },
        ),
    ],
)
def test_tool_choice_becomes_that_of_chat_completions(
    choice: Any, tools: Any, expected: Any
) -> None:
    assert chat(tools=tools, tool_choice=choice)["tool_choice"] == expected


@pytest.mark.parametrize("choice", ["required", {"type": "shell"}])
def test_tool_choice_of_a_hosted_tool_makes_the_run_start_with_a_tool_call(choice: Any) -> None:
    tools = [{"type": "shell"}, {"type": "function", "name": "shell"}]
    translation = as_chat({"model": "m", "input": "Hello.", "tools": tools, "tool_choice": choice})
    assert translation.starts_with_tool
    assert "tool_choice" not in translation.chat


@pytest.mark.parametrize(
    "hosted",
    [
        {"type": "code_interpreter", "container": "cntr_1"},
        {
            "type": "shell",
            "environment": {"type": "container_reference", "container_id": "cntr_1"},
        },
    ],
)
def test_container_of_a_hosted_tool_becomes_sandbox_container_id(hosted: dict[str, Any]) -> None:
    assert chat(tools=[hosted])["sandbox"] == {"container_id": "cntr_1"}


def test_error_in_a_translated_request_names_the_path_in_the_clients_request() -> None:
    container = {"type": "auto", "file_ids": ["file-1", "file-2"]}
    translation = as_chat(
        {
            "model": "m",
            "input": [{"role": "user", "content": "?"}],
            "instructions": "Be brief.",
            "sandbox": {"file_ids": ["file-0"]},
            "tools": [{"type": "code_interpreter", "container": container}],
        }
    )
    assert translation.chat["sandbox"] == {"file_ids": ["file-0", "file-1", "file-2"]}
    outputs = as_chat({"model": "m", "input": [FUNCTION_CALL, {**RESULT, "output": [PICTURE]}]})
    assert outputs.param_paths["messages[1].content"] == "input[1].output"
    for chat_path, path in [
        ("sandbox.file_ids[2]", "tools[0].container.file_ids[1]"),
        ("messages[1].content[0].file_data", "input[0].content[0].file_data"),
        ("max_completion_tokens", "max_output_tokens"),
    ]:
        error = BadRequestError(f"Invalid '{chat_path}'.", param=chat_path)
        translation.restore_param(error)
        assert (error.param, error.message) == (path, f"Invalid '{path}'.")


def test_input_items_get_ids() -> None:
    assert input_items("Hello.", "1") == [
        {
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hello."}],
            "type": "message",
            "id": "msg_1_in0",
        }
    ]
    assert input_items([FUNCTION_CALL, {**RESULT, "id": "fco_x"}], "1") == [
        {"status": "completed", **FUNCTION_CALL, "id": "fc_1_in0"},
        {"status": "completed", **RESULT, "id": "fco_x"},
    ]
