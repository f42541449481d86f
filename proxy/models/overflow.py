"""The sizes in what a backend says when a conversation is too long for it. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policies.context import ContextSizes

MIN_WINDOW, MAX_WINDOW = 256, 100_000_000
"""No model's context is smaller or larger: such a number means something else."""
_N = r"(\d[\d,_]*)"
_WINDOW = (
    # OpenAI, vLLM, SGLang, DeepSeek, OpenRouter: "maximum context length is 4096 tokens"; xAI
    rf"maximum (?:context|prompt|model) length (?:is|of) {_N}",
    # Mistral: "too large for model with 32768 maximum context length"
    rf"{_N} maximum context length",
    # vLLM: "the model's context length is only 4096"; SGLang: "context length (4096 tokens)";
    # llama.cpp: "context size (256 tokens)"; llama-cpp-python: "context window of 2048"
    rf"context (?:length|size|window)(?: is only| is| of)? \(?{_N}",
    # Anthropic: "… tokens > 200000 maximum", "178959 + 64000 > 200000"
    rf"\d(?: tokens)? > {_N}",
    # TGI: "must be <= 4096"; Gemini: "tokens allowed (1048575)"; SGLang: "allowed length (4096";
    # OpenAI: "limit of 272000"; Bedrock: "model maximum (4096)"
    rf"must be <= {_N}",
    rf"(?:allowed|allowed length|configured limit|max_model_len|model maximum)(?: of)? \(?{_N}",
    # vLLM, of an answer that is longer than the window by itself
    rf"max_model_len={_N}",
)
_PROMPT = (
    rf"resulted in {_N} tokens",
    rf"\({_N} in (?:the|your) (?:messages|prompt)",
    rf"{_N} tokens from the input",
    rf"{_N} \+ \d+ > \d",
    rf"(?:has|contains|passed)(?: at least)? {_N} (?:input )?tokens",
    rf"too long: {_N} tokens",
    rf"(?:input|input length|request|tokens|count|prompt) \({_N}(?: tokens)?\)",
    rf"given: {_N}",
    rf"(?:prompt length|count of) {_N}",
)
_ANSWER = (
    rf"\d \+ {_N} > \d",
    rf"{_N} (?:tokens )?(?:in|for) +the completion",
    rf"requested {_N} output tokens",
    rf"is too large: {_N}",
    rf"and {_N} `max_new_tokens`",
    rf"max_(?:completion_)?tokens={_N} cannot be greater",
)


def sizes_in(message: str, fields: Mapping[str, Any]) -> ContextSizes:
    """What an error's words tell, and the fields beside them (llama.cpp's), as far as they agree
    with each other: numbers by which the prompt would have fitted are none."""
    told, (found, words) = _count(fields.get("n_ctx")), _first(_WINDOW, message)
    sizes = ContextSizes(
        window=_plausible(told or found),
        prompt=_count(fields.get("n_prompt_tokens")) or _first(_PROMPT, message)[0],
        answer=_first(_ANSWER, message)[0],
        words="" if told else words,
    )
    return sizes if sizes.is_overflow else ContextSizes()


def fields_kept(fields: Mapping[str, Any]) -> dict[str, int]:
    """What of llama.cpp's fields its clients read in an error, to shorten a conversation by."""
    found = {name: _count(fields.get(name)) for name in ("n_prompt_tokens", "n_ctx")}
    return {name: count for name, count in found.items() if count is not None}


def _first(patterns: Sequence[str], message: str) -> tuple[int | None, str]:
    """Return the number that the first pattern finds, and the passage that it found."""
    for pattern in patterns:
        if found := re.search(pattern, message, re.IGNORECASE):
            return int(re.sub("[,_]", "", found[1])[:12]), found[0]
    return None, ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _plausible(window: int | None) -> int | None:
    return window if window is not None and MIN_WINDOW <= window <= MAX_WINDOW else None
