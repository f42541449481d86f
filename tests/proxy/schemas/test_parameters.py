"""Checks of the fields that OpenAI, vLLM and SGLang know, and their errors."""

from typing import Any

import pytest

from proxy.errors import BadRequestError
from proxy.schemas.chat_parameters import OPENAI, check_parameters, has_effect
from tests.openapi.description import described, field_names

HELLO = {"role": "user", "content": "Hello."}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **fields}]}


def form(**fields: Any) -> dict[str, Any]:
    return {"response_format": fields}


def called(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


@described
def test_every_field_of_openais_chat_request_schema_is_known() -> None:
    assert set(OPENAI) == field_names("CreateChatCompletionRequest")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
        ({"top_p": -1}, "top_p", "decimal_below_min_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value"),
        ({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 129}, "n", "integer_above_max_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"max_completion_tokens": "7"}, "max_completion_tokens", "invalid_type"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_parameter_combination"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "invalid_parameter_combination",
        ),
        (
            {"top_logprobs": 2, "logprobs": False},
            "top_logprobs",
            "invalid_parameter_combination",
        ),
        ({"logprob_token_ids": [7]}, "logprob_token_ids", "invalid_parameter_combination"),
        (
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "invalid_parameter_combination",
        ),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"7": "a"}}, "logit_bias.7", "invalid_type"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7", "decimal_above_max_value"),
        ({"logit_bias": {"7": -101}}, "logit_bias.7", "decimal_below_min_value"),
        ({"stop": 7}, "stop", "invalid_type"),
        ({"stop": ["a", 7]}, "stop[1]", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": True}, "stream_options", "invalid_type"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
        ({"reasoning_effort": "a lot"}, "reasoning_effort", "invalid_value"),
        ({"reasoning_effort": 2}, "reasoning_effort", "decimal_above_max_value"),
        ({"verbosity": "loud"}, "verbosity", "invalid_value"),
        ({"service_tier": "best"}, "service_tier", "invalid_value"),
        ({"modalities": "text"}, "modalities", "invalid_type"),
        ({"metadata": "a"}, "metadata", "invalid_type"),
        ({"store": "yes"}, "store", "invalid_type"),
        ({"user": 7}, "user", "invalid_type"),
        ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content", "empty_array"),
        (
            {"prediction": {"type": "content", "content": [{"type": "file", "text": ""}]}},
            "prediction.content[0].type",
            "invalid_value",
        ),
        (
            {"web_search_options": {"search_context_size": "huge"}},
            "web_search_options.search_context_size",
            "invalid_value",
        ),
        ({"sandbox": "mine"}, "sandbox", "invalid_type"),
        ({"sandbox": {"session": 7}}, "sandbox.session", "invalid_type"),
        ({"sandbox": {"container_id": ["a"]}}, "sandbox.container_id", "invalid_type"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [HELLO, {}]}, "messages[1].role", "missing_required_parameter"),
        (message(role=7), "messages[0].role", "invalid_type"),
        (message(role=None), "messages[0].role", "invalid_type"),
        (message(content=7), "messages[0].content", "invalid_type"),
        (message(content=[7]), "messages[0].content[0]", "invalid_type"),
        (
            message(content=[{"type": "text"}]),
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            message(content=["a", {"type": "image_url", "image_url": {"url": 7}}]),
            "messages[0].content[1].image_url.url",
            "invalid_type",
        ),
        (message(tool_calls={}), "messages[0].tool_calls", "invalid_type"),
        (
            message(tool_calls=[{"function": {"name": 7}}]),
            "messages[0].tool_calls[0].function.name",
            "invalid_type",
        ),
        (message(tool_call_id=7), "messages[0].tool_call_id", "invalid_type"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "missing_required_parameter"),
        (
            {"tools": [{"type": "custom", "custom": {"name": ""}}]},
            "tools[0].custom.name",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
            "missing_required_parameter",
        ),
        (
            message(tool_calls=[{"type": "custom", "custom": {"name": "a"}}]),
            "messages[0].tool_calls[0].custom.input",
            "missing_required_parameter",
        ),
        ({"tools": ["lookup"]}, "tools[0]", "invalid_type"),
        ({"tools": [{}]}, "tools[0].function", "missing_required_parameter"),
        (called(), "tools[0].function.name", "missing_required_parameter"),
        (called(name=""), "tools[0].function.name", "invalid_value"),
        (called(name=None), "tools[0].function.name", "invalid_type"),
        (called(name=7), "tools[0].function.name", "invalid_type"),
        (called(name="a", parameters=[]), "tools[0].function.parameters", "invalid_type"),
        (called(name="a", strict="yes"), "tools[0].function.strict", "invalid_type"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": 7}, "tool_choice", "invalid_type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "invalid_value"),
        ({"tool_choice": {}}, "tool_choice.function", "missing_required_parameter"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": None}}},
            "tool_choice.custom.name",
            "invalid_type",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "none", "tools": []},
                }
            },
            "tool_choice.allowed_tools.mode",
            "invalid_value",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"functions": [{}]}, "functions[0].name", "missing_required_parameter"),
        ({"function_call": {}}, "function_call.name", "missing_required_parameter"),
        (form(), "response_format.type", "missing_required_parameter"),
        (form(type="xml"), "response_format.type", "invalid_value"),
        (form(type="json_schema"), "response_format.json_schema", "missing_required_parameter"),
        (
            form(type="json_schema", json_schema={"schema": {}}),
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            form(type="json_schema", json_schema={"name": "n", "schema": {"type": "nonsense"}}),
            "response_format",
            None,
        ),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        ({"structured_outputs": "a+"}, "structured_outputs", "invalid_type"),
        ({"regex": 7}, "regex", "invalid_type"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "invalid_type"),
        ({"sandbox": []}, "sandbox", "invalid_type"),
    ],
)
def test_invalid_parameter_value_is_refused_with_param_and_code(
    body: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(BadRequestError) as raised:
        check_parameters(body)
    error = raised.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"temperature": "hot"},
            "Invalid type for 'temperature': expected a decimal, but got a string instead.",
        ),
        (
            {"temperature": 3},
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3"
            " instead.",
        ),
        (
            {"seed": 2**63},
            "Invalid 'seed': integer above maximum value. Expected a value <= 9223372036854775807,"
            " but got 9223372036854775808 instead.",
        ),
        (
            {"verbosity": "loud"},
            "Invalid value: 'loud'. Supported values are: 'low', 'medium', and 'high'.",
        ),
        ({"messages": [{}]}, "Missing required parameter: 'messages[0].role'."),
        (
            {"messages": []},
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an"
            " empty array instead.",
        ),
        (
            message(content=7),
            "Invalid type for 'messages[0].content': expected one of a string or array of objects,"
            " but got an integer instead.",
        ),
    ],
)
def test_parameter_error_messages_equal_those_of_openai(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        check_parameters(body)
    assert raised.value.message == message


@pytest.mark.parametrize(
    "body",
    [
        dict.fromkeys(OPENAI),
        {"temperature": 0, "top_p": 1, "n": 128, "seed": -(2**63), "stop": list("abcdef")},
        {"reasoning_effort": 0.5, "top_k": "20", "priority": None, "x_unheard_of": {"a": [1]}},
        {"logit_bias": {"7": -99.5}},
        message(role="latest_reminder", content=None),
        message(role="tool", tool_call_id="c", content=[{"type": "text", "text": "a"}]),
        message(
            content=["bare", {"text": "without a type"}, {"type": "video_url", "video_url": 7}]
        ),
        message(content=[{"type": "image_url", "image_url": "https://host/a.png"}]),
        message(content=[{"type": "file", "file": {"file_id": "file-1"}}]),
        message(role="assistant", tool_calls=[{"function": {"name": "a", "arguments": {"b": 1}}}]),
        message(reasoning_content="hm", x_unknown=[1]),
        form(type="structural_tag", structures=[], triggers=[]),
        form(type="json_object", schema={"type": "nonsense"}),
        called(name="a.b", parameters=None, defer_loading=True),
        {"tool_choice": {"function": {"name": "f"}}},
        {"structured_outputs": {"regex": "["}},
    ],
)
def test_parameter_value_that_some_backend_accepts_is_not_refused(body: dict[str, Any]) -> None:
    check_parameters(body)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_parameter_value_is_refused(value: float) -> None:
    with pytest.raises(BadRequestError) as raised:
        check_parameters({"temperature": value})
    assert raised.value.param == "temperature"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("prompt_logprobs", 0),
    ],
)
def test_parameter_set_to_false_or_zero_has_an_effect_if_its_default_differs(
    name: str, value: int
) -> None:
    assert has_effect(name, value)
