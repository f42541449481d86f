"""The sizes in a backend's error when a conversation is too long."""

from typing import Any

import pytest

from policies.context import ContextSizes
from proxy.errors import ContextOverflowError
from proxy.models.backend_errors import backend_error, parse_context_sizes

NONE = ContextSizes()
LLAMA_CPP = {
    "code": 500,
    "message": "the request exceeds the available context size. try increasing the context size",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 1407,
    "n_ctx": 256,
}


@pytest.mark.parametrize(
    ("words", "window", "prompt", "answer"),
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
def test_sizes_are_parsed_from_the_message(
    words: str, window: int, prompt: int | None, answer: int | None
) -> None:
    error = backend_error({"error": {"message": words, "code": 400}}, status=400)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == ContextSizes(window, prompt, answer)


@pytest.mark.parametrize(
    "words",
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
    ids=["none", "none either", "a word", "too small", "too large", "prompt fits", "other digits"],
)
def test_message_without_plausible_sizes_yields_none(words: str) -> None:
    error = backend_error({"error": {"message": words}}, status=400)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == NONE


@pytest.mark.parametrize("payload", [{"error": LLAMA_CPP}, LLAMA_CPP])
def test_sizes_are_parsed_from_the_fields_of_llama_cpp(payload: Any) -> None:
    error = backend_error(payload, status=500)
    assert isinstance(error, ContextOverflowError)
    assert error.sizes == ContextSizes(256, 1407)


@pytest.mark.parametrize("value", [True, -1, "4096", None, 1.5, []])
def test_size_fields_of_another_type_are_ignored(value: object) -> None:
    assert parse_context_sizes("too long", {"n_ctx": value, "n_prompt_tokens": value}) == NONE
