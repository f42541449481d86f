"""The translation of backends' errors."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from policies.context import ContextSizes
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.backend_errors import (
    backend_error,
    backend_error_from_response,
    parse_context_sizes,
    retry_after_s,
)

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
VLLM_HAS_NO_PARSER = (
    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
)


def fields_of(error: BackendError) -> tuple[int, str, str, str | None, str | None]:
    return error.status, error.message, error.type, error.code, error.param


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param(
            {"error": {"message": "no", "type": "t", "param": "p", "code": "c"}},
            (400, "no", "t", "c", "p"),
            id="OpenAI",
        ),
        pytest.param(
            {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}},
            (400, "no", "BadRequestError", "400", None),
            id="vLLM",
        ),
        pytest.param(
            {"object": "error", "message": "no", "type": "BadRequest", "param": None, "code": 400},
            (400, "no", "BadRequest", "400", None),
            id="SGLang",
        ),
        pytest.param({"detail": "no"}, (400, "no", "backend_error", None, None), id="FastAPI"),
        pytest.param(
            {"detail": [{"loc": ["body", "n"], "msg": "too small", "type": "value_error"}]},
            (400, "body.n: too small", "backend_error", None, None),
            id="FastAPI's validation",
        ),
        pytest.param(
            {"error": "no", "error_type": "overloaded"},
            (400, "no", "overloaded", None, None),
            id="TGI",
        ),
        pytest.param(
            [{"error": {"message": "no", "code": 400, "status": "INVALID_ARGUMENT"}}],
            (400, "no", "backend_error", "400", None),
            id="Gemini",
        ),
        pytest.param(
            {"type": "error", "error": {"type": "overloaded_error", "message": "no"}},
            (400, "no", "overloaded_error", None, None),
            id="Anthropic",
        ),
        pytest.param("no", (400, "no", "backend_error", None, None), id="text"),
        pytest.param({"a": 1}, (400, '{"a": 1}', "backend_error", None, None), id="other JSON"),
        pytest.param(
            None, (400, "the backend failed with 400 and no message", "backend_error", None, None)
        ),
    ],
)
def test_error_body_of_each_server_is_parsed(payload: Any, expected: tuple[Any, ...]) -> None:
    assert fields_of(backend_error(payload, status=400)) == expected


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "The decoder prompt (length 9000) is longer than the maximum model length of 4096.",
        "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
        "Input is too long for requested model.",
        "The input token count (99) exceeds the maximum number of tokens allowed (9).",
        "too many tokens",
        "prompt length 9000 exceeds the server's max_model_len 4096",
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_context_overflow_is_recognized_by_its_error_message(message: str) -> None:
    error = backend_error({"error": {"message": message, "code": 400}}, status=400)
    assert isinstance(error, ContextOverflowError)
    assert (error.status, error.code, error.message) == (400, "context_length_exceeded", message)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (429, "Request too large: this model's maximum context length per minute is reached"),
        (500, "context length"),
        (400, "Invalid 'messages[1].tool_calls[0].id': string too long."),
        (400, "max_tokens: 99999 > 8192, the maximum allowed number of output tokens"),
    ],
)
def test_errors_with_similar_messages_are_not_taken_for_context_overflows(
    status: int, message: str
) -> None:
    error = backend_error({"error": {"message": message}}, status=status)
    assert not isinstance(error, ContextOverflowError)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, VLLM_HAS_NO_PARSER),
        (400, 'tool_choice="required" requires --tool-call-parser to be set'),
        (500, "tools param requires --jinja flag"),
        (400, "registry.ollama.ai/library/stablelm2:latest does not support tools"),
        (404, "No endpoints found that support tool use. Try another model."),
        (400, "`tool calling` is not supported with this model"),
        (400, "Unsupported parameter: 'tools' is not supported with this model."),
        (400, "tools is not supported in this model. For a list of models, see the guide."),
        (400, "deepseek-reasoner does not support Function Calling"),
        (400, "The model does not support tool use or function calling but tools were given."),
        (405, "Tool calling is not supported for model: a/b"),
        (400, "Function calling is not enabled for models/gemma-3"),
        (400, "Functions are not supported for this model version."),
        (400, "sonar does not support parameters: ['top_k', 'tools'], for model=sonar."),
        (422, "body.tools: Extra inputs are not permitted"),
        (400, "Unrecognized request argument supplied: tools"),
    ],
)
def test_refusal_of_tools_is_recognized_by_its_message(status: int, message: str) -> None:
    error = backend_error({"error": {"message": message, "code": "c"}}, status=status)
    assert isinstance(error, ToolsRefusedError)
    assert fields_of(error) == (status, message, "backend_error", "c", None)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "this key does not support tools"),
        (429, "tool use is not supported at this rate"),
        (400, "Unsupported parameter: 'parallel_tool_calls' is not supported with this model."),
        (400, "deepseek-reasoner does not support this tool_choice"),
        (400, "the model does not support parallel tool calls"),
        (400, "Streaming with tools is not supported"),
        (400, "tools are not supported together with response_format"),
        (400, "the backend does not support tools with logprobs"),
        (400, "Unknown parameter: 'tools[0].function.strict'."),
        (400, "Invalid schema for function 'execute_bash'"),
        (400, '"a:latest" does not support thinking'),
        (400, "tools[0].type is not supported"),
    ],
)
def test_errors_with_similar_messages_are_not_taken_for_refusals_of_tools(
    status: int, message: str
) -> None:
    error = backend_error({"error": {"message": message}}, status=status)
    assert not isinstance(error, ToolsRefusedError)


def test_context_overflow_is_recognized_by_its_error_code() -> None:
    payload = {"error": {"message": "no", "code": "context_length_exceeded"}}
    assert isinstance(backend_error(payload, status=None), ContextOverflowError)
    assert backend_error(payload, status=None).status == 400
    assert backend_error(payload, status=413).status == 413


@pytest.mark.parametrize(("code", "status"), [(503, 503), ("429", 429), ("c", 502), (None, 502)])
def test_numeric_code_of_an_error_in_a_stream_becomes_its_status(code: Any, status: int) -> None:
    assert backend_error({"error": {"message": "no", "code": code}}, status=None).status == status


def test_refusal_of_malformed_arguments_by_llama_cpp_is_not_a_server_error() -> None:
    message = "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101]"
    error = {"code": 500, "message": message, "type": "server_error"}
    assert backend_error({"error": error}, status=500).status == 400


def test_secret_is_removed_from_the_message_of_an_error() -> None:
    payload = {"error": {"message": "wrong key sk-12345678."}}
    error = backend_error(payload, status=401, secret="sk-12345678")
    assert error.message == "wrong key [key]."


def test_placeholder_api_key_is_not_removed_from_error_messages() -> None:
    error = backend_error({"error": {"message": "EMPTY input"}}, status=400, secret="EMPTY")
    assert error.message == "EMPTY input"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "Fri, 20 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Fri, 20 Nov 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "2", "retry-after-ms": "1500"}, 1.5),
    ],
)
def test_retry_after_is_parsed_as_seconds_or_date(
    headers: dict[str, str], expected: float | None
) -> None:
    assert retry_after_s(headers, NOW) == expected


def test_http_error_is_built_from_headers_and_body() -> None:
    body = json.dumps({"error": {"message": "slow down", "code": "rate_limited"}}).encode()
    error = backend_error_from_response(429, {"retry-after": "2"}, body, now=NOW)
    assert fields_of(error) == (429, "slow down", "backend_error", "rate_limited", None)
    assert (error.retry_after_s, error.headers) == (2.0, {"Retry-After": "2"})


# Sizes in a context overflow


LLAMA_CPP_ERROR = {
    "code": 500,
    "message": "the request exceeds the available context size. try increasing the context size",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 1407,
    "n_ctx": 256,
}


@pytest.mark.parametrize(
    ("message", "window", "prompt", "answer"),
    [
        # OpenAI
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in"
            " 8202 tokens. Please reduce the length of the messages.",
            *(8192, 8202, None),
        ),
        (
            "This model's maximum context length is 4097 tokens, however you requested 4116 tokens"
            " (3860 in your prompt; 256 for the completion). Please reduce your prompt; or"
            " completion length.",
            *(4097, 3860, 256),
        ),
        (
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in"
            " 509178 tokens. Please reduce the length of the messages.",
            *(272000, 509178, None),
        ),
        # vLLM, by version
        (
            "This model's maximum context length is 131072 tokens. However, you requested 131134"
            " tokens (122942 in the messages, 8192 in the completion). Please reduce the length of"
            " the messages or completion.",
            *(131072, 122942, 8192),
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum"
            " context length is 4096 tokens and your request has 500 input tokens (4000 > 4096 -"
            " 500).",
            *(4096, 500, 4000),
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your request has 5000"
            " input tokens. Please reduce the length of the input messages.",
            *(4096, 5000, None),
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 100 output"
            " tokens and your prompt contains at least 3997 input tokens, for a total of at least"
            " 4097 tokens.",
            *(4096, 3997, 100),
        ),
        (
            "You passed 4097 input tokens and requested 0 output tokens. However, the model's"
            " context length is only 4096 tokens, resulting in a maximum input length of 4096"
            " tokens.",
            *(4096, 4097, 0),
        ),
        (
            "max_tokens=4096 cannot be greater than max_model_len=2048. Please request fewer output"
            " tokens. (parameter=max_tokens, value=4096)",
            *(2048, None, 4096),
        ),
        # SGLang
        (
            "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
            *(4096, 9000, None),
        ),
        (
            "Requested token count exceeds the model's maximum context length of 1000 tokens. You"
            " requested a total of 1206 tokens: 6 tokens from the input messages and 1200 tokens"
            " for the completion.",
            *(1000, 6, 1200),
        ),
        (
            "Input length (9000 tokens) exceeds the maximum allowed length (4096 tokens).",
            *(4096, 9000, None),
        ),
        # Anthropic
        ("prompt is too long: 207791 tokens > 200000 maximum", 200000, 207791, None),
        (
            "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease"
            " input length or `max_tokens` and try again",
            *(200000, 178959, 64000),
        ),
        (
            "litellm.ContextWindowExceededError: litellm.BadRequestError: AnthropicException -"
            ' {"type":"error","error":{"type":"invalid_request_error","message":"prompt is too'
            ' long: 208310 tokens > 200000 maximum"}}',
            *(200000, 208310, None),
        ),
        # llama.cpp, llama-cpp-python
        (
            "request (14429 tokens) exceeds the available context size (8192 tokens), try"
            " increasing it",
            *(8192, 14429, None),
        ),
        ("Requested tokens (2285) exceed context window of 2048", 2048, 2285, None),
        # Gemini, xAI, Mistral, Text Generation Inference, Bedrock
        (
            "The input token count (1196265) exceeds the maximum number of tokens allowed"
            " (1048575).",
            *(1048575, 1196265, None),
        ),
        (
            "This model's maximum prompt length is 131072 but the request contains 537812 tokens",
            *(131072, 537812, None),
        ),
        (
            "Prompt contains 65673 tokens and 0 draft tokens, too large for model with 32768"
            " maximum context length",
            *(32768, 65673, None),
        ),
        (
            "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 3990 `inputs` tokens and"
            " 200 `max_new_tokens`",
            *(4096, 3990, 200),
        ),
        ("prompt tokens (300000) exceed model maximum (200000)", 200000, 300000, None),
        ("Maximum context length is 131,072 tokens; input (140,000 tokens)", 131072, 140000, None),
    ],
)
def test_context_sizes_are_parsed_from_the_message_of_an_overflow(
    message: str, window: int, prompt: int | None, answer: int | None
) -> None:
    error = backend_error({"error": {"message": message, "code": 400}}, status=400)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == ContextSizes(window, prompt, answer)


@pytest.mark.parametrize(
    "message",
    [
        "the request exceeds the available context size, try increasing it",
        "Input is too long for requested model.",
        "This model's maximum context length is unlimited tokens.",
        "This model's maximum context length is 7 tokens.",
        f"This model's maximum context length is {'9' * 5000} tokens.",
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 12"
        " tokens.",
        "maximum context length is \N{ARABIC-INDIC DIGIT FOUR} tokens",
    ],
    ids=[
        "no number",
        "no number, requested model",
        "a word",
        "too small",
        "too large",
        "prompt fits",
        "other digits",
    ],
)
def test_overflow_message_without_plausible_sizes_yields_no_sizes(message: str) -> None:
    error = backend_error({"error": {"message": message}}, status=400)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == ContextSizes()


@pytest.mark.parametrize("payload", [{"error": LLAMA_CPP_ERROR}, LLAMA_CPP_ERROR])
def test_context_sizes_are_parsed_from_the_error_fields_of_llama_cpp(payload: Any) -> None:
    error = backend_error(payload, status=500)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == ContextSizes(256, 1407)


@pytest.mark.parametrize("value", [True, -1, "4096", None, 1.5, []])
def test_context_size_fields_of_a_wrong_type_are_ignored(value: object) -> None:
    assert (
        parse_context_sizes("too long", {"n_ctx": value, "n_prompt_tokens": value})
        == ContextSizes()
    )
