"""Parsing of chat completion requests."""

from typing import Any

import pytest

from policies.answer_form import ANY_JSON, ANY_OBJECT, AnswerForm
from policies.sessions import function_call_id, session_state_names
from proxy.agent.task import ChatRequest, Params
from proxy.errors import BadRequestError
from proxy.schemas.chat_request import (
    check_messages,
    choice_count,
    includes_usage,
    parse_chat,
    with_tool_call_ids,
)
from proxy.schemas.validation import check_request_body, check_text

MESSAGES = [{"role": "user", "content": "Hi", "name": "ada", "x_unknown": [1]}]


EVERY_TURN = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "seed": 7,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "reasoning_effort": "high",
    "chat_template_kwargs": {"enable_thinking": True},
    "priority": 1,
    "cache_salt": "abc",
    "session_id": "s",
    "user": "ada",
    "metadata": {"a": "b"},
    "lora_path": None,
    "x_unheard_of": {"nested": [1, None]},
}
FINAL_ONLY = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}},
    "guided_json": "{}",
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "regex": "a",
    "ebnf": "a",
    "stop": ["\n"],
    "stop_token_ids": [1],
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_logprobs": 0,
    "logit_bias": {"1": 2},
    "return_token_ids": True,
    "min_tokens": 3,
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "skip_special_tokens": False,
    "prediction": {"type": "content", "content": "x"},
}


NAMED = {"type": "function", "function": {"name": "lookup"}}


def parsed(**fields: Any) -> tuple[ChatRequest, Params]:
    return parse_chat({"model": "m", "messages": MESSAGES, **fields})


def request_of(**fields: Any) -> ChatRequest:
    return parsed(**fields)[0]


def params_of(**fields: Any) -> Params:
    return parsed(**fields)[1]


def tool(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def test_request_without_parameters_has_only_messages() -> None:
    assert parsed() == (ChatRequest(MESSAGES, client_tools=[]), Params())


def test_parameters_are_separated_into_those_of_every_model_call_and_of_the_final_one() -> None:
    token_limits = {"max_tokens": 5, "max_completion_tokens": 6}
    tools = [tool("lookup")]
    request, params = parsed(
        **EVERY_TURN,
        **FINAL_ONLY,
        **token_limits,
        tools=tools,
        tool_choice=NAMED,
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        sandbox={"steps": "off"},
    )
    assert params == Params(EVERY_TURN, final=FINAL_ONLY, token_limits=token_limits)
    assert request == ChatRequest(
        messages=MESSAGES,
        client_tools=tools,
        tool_choice=NAMED,
        parallel_tool_calls=False,
        answer_form=ANY_OBJECT,
        stream=True,
        rewrite_links=False,
    )


def test_null_parameters_have_no_effect() -> None:
    nulls = {"response_format": None, "stop": None, "max_tokens": None, "tools": None, "n": None}
    request, params = parsed(**nulls, stream=None, stream_options=None)
    assert params == Params()
    assert (request.client_tools, request.stream) == ([], False)


def test_parameters_without_effect_do_not_require_a_final_answer_call() -> None:
    idle = {"response_format": {"type": "text"}, "skip_special_tokens": True, "stop": [], "n": 1}
    assert params_of(**idle, logprobs=False, top_logprobs=0).final == {}
    assert params_of(**idle, echo=False, min_tokens=3).final == {"min_tokens": 3}


@pytest.mark.parametrize(
    ("guided", "structured"),
    [
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= a"}, {"grammar": "root ::= a"}),
        (
            {"guided_json_object": True, "guided_whitespace_pattern": " "},
            {"json_object": True, "whitespace_pattern": " "},
        ),
    ],
)
def test_guided_fields_become_structured_outputs(
    guided: dict[str, Any], structured: dict[str, Any]
) -> None:
    assert params_of(**guided).final == {**guided, "structured_outputs": structured}


def test_structured_outputs_are_preferred_to_guided_fields() -> None:
    params = {"structured_outputs": {"regex": "b"}, "guided_regex": "a"}
    assert params_of(**params).final == params


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "structural_tag", "structures": []}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ANY_JSON),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "array"}},
                }
            },
            AnswerForm({"type": "array"}),
        ),
        ({"structured_outputs": {"json": {"type": "array"}}}, AnswerForm({"type": "array"})),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, AnswerForm({"type": "array"})),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"guided_json": {"type": "array"}}, AnswerForm({"type": "array"})),
        ({"structured_outputs": {"regex": "a"}}, None),
        ({"structured_outputs": {"json": "{"}}, None),
    ],
)
def test_answer_form_is_read_from_the_format_parameters(
    fields: dict[str, Any], form: AnswerForm | None
) -> None:
    assert request_of(**fields).answer_form == form


def test_legacy_functions_become_tools() -> None:
    function = {"name": "lookup", "parameters": {"type": "object"}}
    request, params = parsed(functions=[function], function_call={"name": "lookup"})
    assert (request.client_tools, request.tool_choice, request.parallel_tool_calls) == (
        [{"type": "function", "function": function}],
        {"type": "function", "function": {"name": "lookup"}},
        False,
    )
    assert (request.legacy_state is None, params.base) == (False, {})


def test_legacy_function_calls_and_results_become_tool_calls_and_results() -> None:
    call = {"name": "lookup", "arguments": '{"a": 1}'}
    unmatched = {"role": "function", "name": "other", "content": "?"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "lookup", "content": "7"},
        unmatched,
    ]
    id = function_call_id(session_state_names(MESSAGES)[0], "lookup", '{"a": 1}')
    tool_call = {"id": id, "type": "function", "function": call}
    assert request_of(functions=[{"name": "lookup"}], messages=messages).messages == [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": id, "content": "7"},
        unmatched,
    ]


def test_conversion_of_function_calls_reads_each_message_a_constant_number_of_times() -> None:
    def reads(turns: int) -> int:
        seen = []

        class Message(dict[str, Any]):
            def get(self, key: str, default: Any = None) -> Any:
                seen.append(key)
                return super().get(key, default)

        call = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
        turn = (call, {"role": "function", "name": "f", "content": "7"})
        with_tool_call_ids([Message(each) for _ in range(turns) for each in turn])
        return len(seen)

    assert reads(30) - reads(20) == reads(20) - reads(10)


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"n": None}, 1), ({"n": 3}, 3)])
def test_choice_count_defaults_to_one(fields: dict[str, Any], count: int) -> None:
    assert choice_count(fields, 3) == count


def test_choice_count_above_the_limit_is_refused() -> None:
    with pytest.raises(BadRequestError) as raised:
        choice_count({"n": 4}, 3)
    error = raised.value
    assert (error.param, error.code) == ("n", "integer_above_max_value")
    assert error.message == (
        "Invalid 'n': integer above maximum value. Expected a value <= 3, but got 4 instead."
    )


def test_parameter_parallel_tool_calls_is_dropped_without_client_tools() -> None:
    request, params = parsed(parallel_tool_calls=True)
    assert (request.parallel_tool_calls, params.base) == (None, {})


@pytest.mark.parametrize(
    ("fields", "rewritten"),
    [
        ({}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"guided_regex": "a"}, False),
        ({"guided_choice": ["a"]}, False),
        ({"regex": "a"}, False),
        ({"stop": ["a"]}, True),
    ],
)
def test_links_are_rewritten_only_if_the_request_sets_no_answer_format(
    fields: dict[str, Any], rewritten: bool
) -> None:
    assert request_of(**fields).rewrite_links is rewritten


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ([], None, None),
        ("text", None, None),
        (None, None, None),
        ({"messages": MESSAGES}, "model", "missing_required_parameter"),
        ({"model": None, "messages": MESSAGES}, "model", "invalid_type"),
        ({"model": 7, "messages": MESSAGES}, "model", "invalid_type"),
        ({"model": "m"}, "messages", "missing_required_parameter"),
        ({"model": "m", "messages": None}, "messages", "invalid_type"),
        ({"model": "m", "messages": "Hi"}, "messages", "invalid_type"),
        ({"model": "m", "messages": []}, "messages", "empty_array"),
        ({"model": "m", "messages": ["Hi"]}, "messages[0]", "invalid_type"),
    ],
)
def test_invalid_chat_request_body_is_refused(
    body: object, param: str | None, code: str | None
) -> None:
    with pytest.raises(BadRequestError) as raised:
        check_messages(check_request_body(body, model=check_text))
    error = raised.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, code)
    assert error.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream_options": True}, "stream_options", "invalid_type"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"n": "1"}, "n", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 1.0}, "n", "invalid_type"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
            None,
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "invalid_parameter_combination",
        ),
        (
            {"guided_json": {"type": "object"}, "guided_choice": ["a"]},
            "structured_outputs",
            "invalid_parameter_combination",
        ),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call.name",
            None,
        ),
        (
            {"functions": [{"name": "f"}], "tools": [tool("f")]},
            "functions",
            "invalid_parameter_combination",
        ),
    ],
)
def test_invalid_chat_parameter_is_refused_with_param_and_code(
    fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(BadRequestError) as raised:
        request_of(**fields)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


def test_error_for_a_wrong_type_names_the_expected_and_the_actual_type() -> None:
    with pytest.raises(BadRequestError) as raised:
        request_of(stream="yes")
    assert raised.value.body() == {
        "error": {
            "message": "Invalid type for 'stream': expected a boolean, but got a string instead.",
            "type": "invalid_request_error",
            "param": "stream",
            "code": "invalid_type",
        }
    }


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_include_usage_is_read_from_stream_options(options: dict[str, Any], wanted: bool) -> None:
    assert includes_usage(options) is wanted


def test_tool_choice_required_demands_a_client_tool_if_the_client_has_tools() -> None:
    request = request_of(tools=[tool("a")], tool_choice="required")
    assert (request.must_call, request.tool_choice) == (True, None)
    request = request_of(tool_choice="required")
    assert (request.must_call, request.tool_choice) == (False, "required")


@pytest.mark.parametrize(("mode", "must_call"), [("auto", False), ("required", True)])
def test_model_sees_only_allowed_tools(mode: str, must_call: bool) -> None:
    named = {"type": "function", "function": {"name": "b"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    request = request_of(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert (request.client_tools, request.must_call) == ([tool("b")], must_call)


def test_client_tool_may_have_the_name_of_a_sandbox_tool() -> None:
    assert request_of(tools=[tool("submit")]).client_tools == [tool("submit")]
