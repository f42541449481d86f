"""Translates a backend's failures, in any server's format, into our errors. Pure.

Open it when a backend's error gets the wrong status, type or message, or when a context overflow or
a refusal of tools is not recognized.
"""

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from policies.context import ContextSizes
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

MAX_TEXT_CHARS = 1000
"""The most characters kept of an error that is not JSON, such as a gateway's HTML page."""
_MUCH_BYTES = 64 << 10
"""JSON longer than this is decoded without garbage collection."""
_OVERFLOW_CODE = "context_length_exceeded"
_LLAMA_CPPS_TYPE = "exceed_context_size_error"
_OVERFLOW_STATUSES = (400, 413, 422)
_OVERFLOW_WORDS = re.compile(
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
_NO_TOOLS_STATUSES = (400, 404, 405, 422, 500, 501)
"""OpenRouter's refusal has 404, DeepInfra's 405, that of older llama.cpp servers 500."""
_ANY_TOOLS = r"(?:tools|tool[- _](?:use|usage|calls|calling)|functions?(?:[- _]call(?:s|ing)?)?)"
_WITH_TOOLS_ALONE = (
    r"(?![\w\[]|\.\w)"
    r"(?!\W+(?:with|when|while|if|in|together|alongside)\b(?! (?:this|the|your) model))"
)
"""Excludes refusals of tools together with another parameter, and of a single tool."""
_NO_TOOLS_WORDS = re.compile(
    # vLLM; llama.cpp
    r"requires? --(?:enable-auto-tool-choice|tool-call-parser)"
    r"|\btool\S* param requires --jinja"
    # Ollama, xAI, DeepSeek; OpenRouter; litellm
    rf"|(?:not|n't|no endpoints found that) support (?:the )?{_ANY_TOOLS}\b{_WITH_TOOLS_ALONE}"
    r"|not support parameters: \[[^\]]*'tools'"
    # OpenAI, Groq, Azure, DeepInfra; Gemini, Mistral
    rf"|(?<!with )(?<![\w-])['\"`]?{_ANY_TOOLS}['\"`]?"
    rf" (?:is|are) not (?:supported|enabled)\b{_WITH_TOOLS_ALONE}"
    # servers whose requests have no such field
    r"|\btools: extra (?:inputs|fields) (?:are )?not permitted"
    r"|\bargument supplied: tools\b",
    re.IGNORECASE,
)
MIN_WINDOW, MAX_WINDOW = 256, 100_000_000
"""The smallest and the largest context that a model can have; other numbers mean something else."""
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


@dataclass(frozen=True, slots=True)
class _ErrorBody:
    """The fields of an error's body, whatever its format."""

    message: str = ""
    type: str | None = None
    code: str | None = None
    param: str | None = None
    sizes: ContextSizes = ContextSizes()
    beside: Mapping[str, int] = field(default_factory=dict)


def backend_error(
    payload: Any,
    *,
    status: int | None,
    retry_after_s: float | None = None,
    secret: str | None = None,
    overflows: bool = False,
) -> BackendError:
    """Return the error for a backend's JSON or text. Its message never contains `secret`.

    Without a `status`, inside a stream, the payload's own code serves as the status if it is one.
    `overflows` is True if the caller knows that the conversation is too long.
    """
    said = _read(payload)
    if status is None:
        status = _status_in(said.code)
    overflows = overflows or _tells_of_overflow(said, status)
    kind = ContextOverflowError if overflows else BackendError
    no_tools = "" if overflows else _words_of_no_tools(said, status)
    if no_tools:
        kind = ToolsRefusedError
    status = _error_status(status, overflows)
    error = kind(
        redacted(said.message, secret) or f"the backend failed with {status} and no message",
        status=status,
        type=said.type or "backend_error",
        code=_OVERFLOW_CODE if overflows else said.code,
        param=said.param,
        retry_after_s=retry_after_s,
    )
    if isinstance(error, ContextOverflowError):
        error.sizes = said.sizes
        error.beside = dict(said.beside)
    if isinstance(error, ToolsRefusedError):
        error.words = no_tools
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
    return backend_error(payload_of(body), status=status, retry_after_s=wait_s, secret=secret)


def is_error(payload: Any) -> bool:
    """Return True if what should be a completion or a chunk is an error, wrapped or flat."""
    if not isinstance(payload, dict):
        return False
    return bool(payload.get("error")) or payload.get("object") == "error"


def payload_of(body: bytes) -> Any:
    """Decode an error's body as JSON, else return the beginning of its text."""
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()[:MAX_TEXT_CHARS]


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds to wait, by `retry-after-ms` or `retry-after`, or None."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after", "").strip()
    seconds = _number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def redacted(message: str, secret: str | None) -> str:
    """Replace the secret in a message. Placeholders such as "EMPTY" are too short to be secrets."""
    return message if secret is None or len(secret) < 8 else message.replace(secret, "[key]")


def unreachable(reason: str) -> BackendError:
    """Return the error for a backend that cannot be reached, or whose connection was lost."""
    return BackendError(
        f"the backend cannot be reached: {reason}", status=502, code="backend_unreachable"
    )


def timed_out(reason: str) -> BackendError:
    """Return the error for a backend that was silent for too long."""
    return BackendError(
        f"the backend did not answer in time: {reason}", status=504, code="backend_timeout"
    )


def cut_off() -> BackendError:
    """Return the error for a connection that ended in the middle of an answer."""
    return BackendError(
        "the backend's connection closed before the answer was complete",
        status=502,
        code="backend_unreachable",
    )


def is_no_answer(error: BackendError) -> bool:
    """Return True if the backend sent no answer at all."""
    return error.code in ("backend_unreachable", "backend_timeout")


def parsed(text: bytes) -> Any:
    """Decode a backend's JSON, with NaN and Infinity as null. Raises BackendError."""
    # Every collection visits all values decoded so far: a large body takes five times as long.
    waits = len(text) > _MUCH_BYTES and gc.isenabled()
    if waits:
        gc.disable()
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise bad_response("it is not JSON") from error
    finally:
        if waits:
            gc.enable()


@contextmanager
def expected(what: str) -> Iterator[None]:
    """Raise BackendError if a field in `what` turns out to have the wrong type."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise bad_response(f"{what} has a field of a wrong type") from error


def bad_response(reason: str) -> BackendError:
    """Return the error for an answer that does not follow the API."""
    return BackendError(
        f"the backend's answer cannot be read: {reason}", status=502, code="backend_bad_response"
    )


def _read(payload: Any) -> _ErrorBody:
    """Read OpenAI's wrapped format, SGLang's flat one, FastAPI's `detail`, or plain text."""
    if isinstance(payload, list) and payload and isinstance(payload[0], dict):
        payload = payload[0]  # Gemini's OpenAI endpoint wraps the error in a list
    if not isinstance(payload, dict):
        message = _text(payload)
        return _ErrorBody(message=message, sizes=sizes_in(message, {}))
    fields = payload.get("error") or payload
    if not isinstance(fields, dict):
        message = _text(fields)
        kind = _word(payload.get("error_type"))
        return _ErrorBody(message=message, type=kind, sizes=sizes_in(message, payload))
    message = _text(fields.get("message") or fields.get("detail") or fields.get("error") or fields)
    return _ErrorBody(
        message=message,
        type=_word(fields.get("type")),
        code=_word(fields.get("code")),
        param=_word(fields.get("param")),
        sizes=sizes_in(message, fields),
        beside=_size_fields(fields),
    )


def _tells_of_overflow(said: _ErrorBody, status: int | None) -> bool:
    if said.code == _OVERFLOW_CODE or said.type == _LLAMA_CPPS_TYPE:
        return True
    return status in _OVERFLOW_STATUSES and _OVERFLOW_WORDS.search(said.message) is not None


def _words_of_no_tools(said: _ErrorBody, status: int | None) -> str:
    """Return the passage that refuses tools, or an empty text."""
    if status is not None and status not in _NO_TOOLS_STATUSES:
        return ""
    found = _NO_TOOLS_WORDS.search(said.message[:MAX_TEXT_CHARS])
    return found[0] if found else ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_complaint(item) for item in value):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in value)
    return json.dumps(value)[:MAX_TEXT_CHARS]


def _is_complaint(item: Any) -> bool:
    """Return True for an entry of FastAPI's validation errors."""
    return isinstance(item, dict) and isinstance(item.get("loc"), list) and "msg" in item


def _word(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _status_in(code: str | None) -> int | None:
    return int(code) if code is not None and re.fullmatch("[45][0-9][0-9]", code) else None


def _error_status(status: int | None, overflows: bool) -> int:
    """Return the status of the error. A redirect, or a 200 with an error inside, becomes a 4xx or
    5xx."""
    if status is not None and 400 <= status < 600:
        return status
    return 400 if overflows else 502


def _number(value: str) -> float | None:
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


def sizes_in(message: str, fields: Mapping[str, Any]) -> ContextSizes:
    """Return the sizes that an error's message, and llama.cpp's fields beside it, report. Sizes by
    which the prompt would have fitted are ignored."""
    told, (found, words) = _count(fields.get("n_ctx")), _first(_WINDOW, message)
    window = told or found
    sizes = ContextSizes(
        window=window if window is not None and MIN_WINDOW <= window <= MAX_WINDOW else None,
        prompt=_count(fields.get("n_prompt_tokens")) or _first(_PROMPT, message)[0],
        answer=_first(_ANSWER, message)[0],
        excerpt="" if told else words,
    )
    return sizes if sizes.is_overflow else ContextSizes()


def _size_fields(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return llama.cpp's size fields, which its clients read to shorten a conversation."""
    found = {name: _count(fields.get(name)) for name in ("n_prompt_tokens", "n_ctx")}
    return {name: count for name, count in found.items() if count is not None}


def _first(patterns: Sequence[str], message: str) -> tuple[int | None, str]:
    """Return the number that the first matching pattern finds, and the passage around it."""
    for pattern in patterns:
        if found := re.search(pattern, message, re.IGNORECASE):
            return int(re.sub("[,_]", "", found[1])[:12]), found[0]
    return None, ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
