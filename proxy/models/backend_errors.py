"""Translates a backend's failures, in any server's format, into BackendErrors. The module does no
I/O.

Open it when a backend's error gets the wrong status, type or message, or when a context overflow or
a refusal of tools is not recognized.
"""

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic_core import from_json

from policies.context import ContextSizes
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

MAX_TEXT_CHARS = 1000
"""Maximum length of the message of an error that is not JSON, such as a gateway's HTML page."""
_LONG_JSON_BYTES = 64 << 10
"""Garbage collection pauses while JSON longer than this is decoded."""
_OVERFLOW_CODE = "context_length_exceeded"
_LLAMA_CPP_OVERFLOW_TYPE = "exceed_context_size_error"
_OVERFLOW_STATUSES = (400, 413, 422)
_OVERFLOW = re.compile(
    r"context[ _](length|window|size|limit)"
    r"|(prompt|inputs?|request|conversation)( \([^)]*\))? (is|are|was) (too long|longer than)"
    r"|too many (input |prompt )?tokens"
    r"|maximum (model|input|prompt|sequence) length"
    r"|(input|prompt) (length|tokens) (\([^)]*\) )?exceeds? (the|model) (maximum|configured)"
    r"|`inputs` tokens \+ `max_new_tokens` must be"
    r"|maximum number of (input )?tokens"
    r"|exceeds?\b.{0,60}\bmax_(model_len|input_length|total_tokens)"
    r"|max_(completion_)?tokens=\d+ cannot be greater than max_model_len",
    re.IGNORECASE | re.DOTALL,
)
_TOOLS_REFUSED_STATUSES = (400, 404, 405, 422, 500, 501)
"""Statuses with which backends refuse tools. OpenRouter sends 404, DeepInfra 405, older llama.cpp
servers 500."""
_TOOLS = r"(?:tools|tool[- _](?:use|usage|calls|calling)|functions?(?:[- _]call(?:s|ing)?)?)"
_NOT_COMBINED = (
    r"(?![\w\[]|\.\w)"
    r"(?!\W+(?:with|when|while|if|in|together|alongside)\b(?! (?:this|the|your) model))"
)
"""Negative lookaheads of `_TOOLS_REFUSED`. They exclude a message that refuses a single tool, or
tools in combination with another parameter."""
_TOOLS_REFUSED = re.compile(
    # vLLM; llama.cpp
    r"requires? --(?:enable-auto-tool-choice|tool-call-parser)"
    r"|\btool\S* param requires --jinja"
    # Ollama, xAI, DeepSeek; OpenRouter; litellm
    rf"|(?:not|n't|no endpoints found that) support (?:the )?{_TOOLS}\b{_NOT_COMBINED}"
    r"|not support parameters: \[[^\]]*'tools'"
    # OpenAI, Groq, Azure, DeepInfra; Gemini, Mistral
    rf"|(?<!with )(?<![\w-])['\"`]?{_TOOLS}['\"`]?"
    rf" (?:is|are) not (?:supported|enabled)\b{_NOT_COMBINED}"
    # servers that do not know the field
    r"|\btools: extra (?:inputs|fields) (?:are )?not permitted"
    r"|\bargument supplied: tools\b",
    re.IGNORECASE,
)
_INVALID_ARGUMENTS = "parse tool call arguments"
"""Part of llama.cpp's message for a prompt with a call whose arguments are not JSON."""
MIN_WINDOW, MAX_WINDOW = 256, 100_000_000
"""The smallest and the largest plausible context, in tokens."""
_COUNT = r"(\d[\d,_]*)"
_WINDOW_PATTERNS = (
    # OpenAI, vLLM, SGLang, DeepSeek, OpenRouter: "maximum context length is 4096 tokens"; xAI
    rf"maximum (?:context|prompt|model) length (?:is|of) {_COUNT}",
    # Mistral: "too large for model with 32768 maximum context length"
    rf"{_COUNT} maximum context length",
    # vLLM: "the model's context length is only 4096"; SGLang: "context length (4096 tokens)";
    # llama.cpp: "context size (256 tokens)"; llama-cpp-python: "context window of 2048"
    rf"context (?:length|size|window)(?: is only| is| of)? \(?{_COUNT}",
    # Anthropic: "… tokens > 200000 maximum", "178959 + 64000 > 200000"
    rf"\d(?: tokens)? > {_COUNT}",
    # TGI: "must be <= 4096"; Gemini: "tokens allowed (1048575)"; SGLang: "allowed length (4096";
    # OpenAI: "limit of 272000"; Bedrock: "model maximum (4096)"
    rf"must be <= {_COUNT}",
    rf"(?:allowed|allowed length|configured limit|max_model_len|model maximum)(?: of)? \(?{_COUNT}",
    # vLLM, if max_tokens exceeds the context
    rf"max_model_len={_COUNT}",
)
_PROMPT_PATTERNS = (
    rf"resulted in {_COUNT} tokens",
    rf"\({_COUNT} in (?:the|your) (?:messages|prompt)",
    rf"{_COUNT} tokens from the input",
    rf"{_COUNT} \+ \d+ > \d",
    rf"(?:has|contains|passed)(?: at least)? {_COUNT} (?:input )?tokens",
    rf"too long: {_COUNT} tokens",
    rf"(?:input|input length|request|tokens|count|prompt) \({_COUNT}(?: tokens)?\)",
    rf"given: {_COUNT}",
    rf"(?:prompt length|count of) {_COUNT}",
)
_ANSWER_PATTERNS = (
    rf"\d \+ {_COUNT} > \d",
    rf"{_COUNT} (?:tokens )?(?:in|for) +the completion",
    rf"requested {_COUNT} output tokens",
    rf"is too large: {_COUNT}",
    rf"and {_COUNT} `max_new_tokens`",
    rf"max_(?:completion_)?tokens={_COUNT} cannot be greater",
)


@dataclass(frozen=True, slots=True)
class _ErrorBody:
    """The fields of an error's body, read from any server's format."""

    message: str = ""
    type: str | None = None
    code: str | None = None
    param: str | None = None
    sizes: ContextSizes = ContextSizes()
    llama_cpp_sizes: Mapping[str, int] = field(default_factory=dict)


def backend_error(
    payload: Any,
    *,
    status: int | None,
    retry_after_s: float | None = None,
    secret: str | None = None,
    overflows: bool = False,
) -> BackendError:
    """Return the BackendError for an error that a backend sent as JSON or text.

    `payload` is the decoded JSON, or the text. `secret` is replaced in the error's message; see
    `redact`. `status` is None for an error inside a stream: the error's code is then the status, if
    the code is a number from 400 to 599. `overflows` is True if the caller knows that the
    conversation is too long.
    """
    body = _parse_error_body(payload)
    if status is None:
        status = _status_from_code(body.code)
    overflows = overflows or _is_overflow(body, status)
    kind = ContextOverflowError if overflows else BackendError
    tools_refusal = "" if overflows else _find_tools_refusal(body, status)
    if tools_refusal:
        kind = ToolsRefusedError
    if _INVALID_ARGUMENTS in body.message:
        status = 400  # llama.cpp sends 500, but a retry would fail too
    status = _error_status(status, overflows)
    error = kind(
        redact(body.message, secret) or f"the backend failed with {status} and no message",
        status=status,
        type=body.type or "backend_error",
        code=_OVERFLOW_CODE if overflows else body.code,
        param=body.param,
        retry_after_s=retry_after_s,
    )
    if isinstance(error, ContextOverflowError):
        error.sizes = body.sizes
        error.extra_fields = dict(body.llama_cpp_sizes)
    if isinstance(error, ToolsRefusedError):
        error.words = tools_refusal
    return error


def backend_error_from_response(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: datetime,
    secret: str | None = None,
) -> BackendError:
    """Return the error for a backend's HTTP response. The names in `headers` are lower case."""
    wait_s = retry_after_s(headers, now)
    return backend_error(
        decode_error_body(body), status=status, retry_after_s=wait_s, secret=secret
    )


def is_error(payload: Any) -> bool:
    """Return True if the payload is an error instead of a completion or a chunk."""
    if not isinstance(payload, dict):
        return False
    return bool(payload.get("error")) or payload.get("object") == "error"


def decode_error_body(body: bytes) -> Any:
    """Return an error's body decoded as JSON, or the first `MAX_TEXT_CHARS` of its text."""
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()[:MAX_TEXT_CHARS]


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the delay in seconds from the header `retry-after-ms`, else from `retry-after`, else
    None. The names in `headers` are lower case."""
    milliseconds = _parse_number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after", "").strip()
    seconds = _parse_number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def redact(message: str, secret: str | None) -> str:
    """Replace the secret in a message. A secret of fewer than 8 characters, such as "EMPTY", is
    only a placeholder and is not replaced."""
    return message if secret is None or len(secret) < 8 else message.replace(secret, "[key]")


def unreachable_error(reason: str) -> BackendError:
    """Return the error for a backend that cannot be reached."""
    return BackendError(
        f"the backend cannot be reached: {reason}", status=502, code="backend_unreachable"
    )


def timeout_error(reason: str) -> BackendError:
    """Return the error for a backend that sent nothing for too long."""
    return BackendError(
        f"the backend did not answer in time: {reason}", status=504, code="backend_timeout"
    )


def connection_lost_error() -> BackendError:
    """Return the error for a connection that was closed before the end of a response."""
    return BackendError(
        "the backend's connection closed before the answer was complete",
        status=502,
        code="backend_unreachable",
    )


def is_transport_error(error: BackendError) -> bool:
    """Return True if the backend was unreachable, timed out or lost the connection."""
    return error.code in ("backend_unreachable", "backend_timeout")


def parse_json(text: bytes) -> Any:
    """Decode a backend's JSON, with NaN and Infinity as null. Raises BackendError."""
    # Each garbage collection visits all decoded values: a large body would take five times as long.
    pauses_gc = len(text) > _LONG_JSON_BYTES and gc.isenabled()
    if pauses_gc:
        gc.disable()
    try:
        # Twice as fast as `json.loads`, but refuses NaN, Infinity, lone surrogates and UTF-16.
        with suppress(ValueError):
            return from_json(text, allow_inf_nan=False)
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise bad_response_error("it is not JSON") from error
    finally:
        if pauses_gc:
            gc.enable()


@contextmanager
def raise_backend_error_for_wrong_types(value_name: str) -> Iterator[None]:
    """Raise BackendError for an exception that a field of the wrong type causes in the block.
    `value_name` names the parsed value in the error's message."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise bad_response_error(f"{value_name} has a field of a wrong type") from error


def bad_response_error(reason: str) -> BackendError:
    """Return the error for a response that does not follow the API."""
    return BackendError(
        f"the backend's answer cannot be read: {reason}", status=502, code="backend_bad_response"
    )


def _parse_error_body(payload: Any) -> _ErrorBody:
    """Parse OpenAI's wrapped format, SGLang's flat format, FastAPI's `detail`, or text."""
    if isinstance(payload, list) and payload and isinstance(payload[0], dict):
        payload = payload[0]  # Gemini's OpenAI endpoint wraps the error in a list
    if not isinstance(payload, dict):
        message = _message_text(payload)
        return _ErrorBody(message=message, sizes=parse_context_sizes(message, {}))
    fields = payload.get("error") or payload
    if not isinstance(fields, dict):
        message = _message_text(fields)
        kind = _optional_str(payload.get("error_type"))
        return _ErrorBody(message=message, type=kind, sizes=parse_context_sizes(message, payload))
    message = _message_text(
        fields.get("message") or fields.get("detail") or fields.get("error") or fields
    )
    return _ErrorBody(
        message=message,
        type=_optional_str(fields.get("type")),
        code=_optional_str(fields.get("code")),
        param=_optional_str(fields.get("param")),
        sizes=parse_context_sizes(message, fields),
        llama_cpp_sizes=_llama_cpp_sizes(fields),
    )


def _is_overflow(body: _ErrorBody, status: int | None) -> bool:
    if body.code == _OVERFLOW_CODE or body.type == _LLAMA_CPP_OVERFLOW_TYPE:
        return True
    return status in _OVERFLOW_STATUSES and _OVERFLOW.search(body.message) is not None


def _find_tools_refusal(body: _ErrorBody, status: int | None) -> str:
    """Return the part of the message that refuses tools, or an empty string."""
    if status is not None and status not in _TOOLS_REFUSED_STATUSES:
        return ""
    found = _TOOLS_REFUSED.search(body.message[:MAX_TEXT_CHARS])
    return found[0] if found else ""


def _message_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_validation_error(item) for item in value):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in value)
    return json.dumps(value)[:MAX_TEXT_CHARS]


def _is_validation_error(item: Any) -> bool:
    """Return True if the item is one of FastAPI's validation errors."""
    return isinstance(item, dict) and isinstance(item.get("loc"), list) and "msg" in item


def _optional_str(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _status_from_code(code: str | None) -> int | None:
    return int(code) if code is not None and re.fullmatch("[45][0-9][0-9]", code) else None


def _error_status(status: int | None, overflows: bool) -> int:
    """Return `status` if it is from 400 to 599, else 400 for an overflow and 502 for any other
    error."""
    if status is not None and 400 <= status < 600:
        return status
    return 400 if overflows else 502


def _parse_number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


def _seconds_until(http_date: str, now: datetime) -> float | None:
    try:
        moment = parsedate_to_datetime(http_date)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def parse_context_sizes(message: str, fields: Mapping[str, Any]) -> ContextSizes:
    """Return the sizes that an error states in llama.cpp's `fields`, else in `message`. Return no
    sizes if the size of the context is missing, or if prompt and answer would have fit."""
    n_ctx, (in_message, in_words) = (
        _positive_int(fields.get("n_ctx")),
        _number_and_match(_WINDOW_PATTERNS, message),
    )
    window = n_ctx or in_message
    sizes = ContextSizes(
        window=window if window is not None and MIN_WINDOW <= window <= MAX_WINDOW else None,
        prompt=_positive_int(fields.get("n_prompt_tokens"))
        or _number_and_match(_PROMPT_PATTERNS, message)[0],
        answer=_number_and_match(_ANSWER_PATTERNS, message)[0],
        excerpt="" if n_ctx else in_words,
    )
    return sizes if sizes.is_overflow else ContextSizes()


def _llama_cpp_sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return llama.cpp's size fields, which clients of llama.cpp read to shorten a conversation."""
    counts = {name: _positive_int(fields.get(name)) for name in ("n_prompt_tokens", "n_ctx")}
    return {name: count for name, count in counts.items() if count is not None}


def _number_and_match(patterns: Sequence[str], message: str) -> tuple[int | None, str]:
    """Return the number that the first matching pattern finds, and the text that it matches. Return
    None and "" if no pattern matches."""
    for pattern in patterns:
        if found := re.search(pattern, message, re.IGNORECASE):
            return int(re.sub("[,_]", "", found[1])[:12]), found[0]
    return None, ""


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
