"""What a backend says when it fails, as our errors. Pure."""

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from policies.context import ContextSizes
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.overflow import fields_kept, sizes_in

MAX_TEXT_CHARS = 1000
"""Of an error that is no JSON, such as a gateway's HTML page."""

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
"""Not a refusal of tools beside another parameter, nor of one tool."""
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


@dataclass(frozen=True, slots=True)
class _Said:
    """What the body of an error says, whatever its shape."""

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
    """The error that a backend's JSON (or text) means; `secret` never gets into its message.

    Without a `status` (inside a stream) the payload's own code is taken for it where it is one.
    `overflows` says what the caller knows already: the conversation is too long.
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
    """The error that a backend's HTTP response means; `headers` are named in lower case."""
    wait_s = retry_after_s(headers, now)
    return backend_error(payload_of(body), status=status, retry_after_s=wait_s, secret=secret)


def is_error(payload: Any) -> bool:
    """Whether a completion or a chunk is an error instead, wrapped or flat."""
    if not isinstance(payload, dict):
        return False
    return bool(payload.get("error")) or payload.get("object") == "error"


def payload_of(body: bytes) -> Any:
    """An error's body: JSON, or the beginning of its text."""
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()[:MAX_TEXT_CHARS]


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """The seconds a backend asks to wait, from `retry-after-ms` or `retry-after`."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after", "").strip()
    seconds = _number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def redacted(message: str, secret: str | None) -> str:
    """The message without the secret. Placeholders such as "EMPTY" are too short to be secrets."""
    return message if secret is None or len(secret) < 8 else message.replace(secret, "[key]")


def unreachable(reason: str) -> BackendError:
    """The backend cannot be reached, or the connection was lost."""
    return BackendError(
        f"the backend cannot be reached: {reason}", status=502, code="backend_unreachable"
    )


def timed_out(reason: str) -> BackendError:
    """The backend was silent for too long."""
    return BackendError(
        f"the backend did not answer in time: {reason}", status=504, code="backend_timeout"
    )


def cut_off() -> BackendError:
    """The connection ended in the midst of an answer."""
    return BackendError(
        "the backend's connection closed before the answer was complete",
        status=502,
        code="backend_unreachable",
    )


def is_no_answer(error: BackendError) -> bool:
    """Whether the backend said nothing at all."""
    return error.code in ("backend_unreachable", "backend_timeout")


def parsed(text: bytes) -> Any:
    """A backend's JSON; what JSON does not have (NaN, Infinity) is null. Raises BackendError."""
    # Each collection looks at the values made so far: with many, that takes five times as long.
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
    """Tell of a field that has another type than the API says, wherever in `what` it is met."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise bad_response(f"{what} has a field of a wrong type") from error


def bad_response(reason: str) -> BackendError:
    """The backend answered, but not as its API says."""
    return BackendError(
        f"the backend's answer cannot be read: {reason}", status=502, code="backend_bad_response"
    )


def _read(payload: Any) -> _Said:
    """OpenAI's wrapped form, SGLang's flat one, FastAPI's `detail`, or a mere text."""
    if isinstance(payload, list) and payload and isinstance(payload[0], dict):
        payload = payload[0]  # Gemini's OpenAI endpoint wraps the error in a list
    if not isinstance(payload, dict):
        message = _text(payload)
        return _Said(message=message, sizes=sizes_in(message, {}))
    fields = payload.get("error") or payload
    if not isinstance(fields, dict):
        message = _text(fields)
        kind = _word(payload.get("error_type"))
        return _Said(message=message, type=kind, sizes=sizes_in(message, payload))
    message = _text(fields.get("message") or fields.get("detail") or fields.get("error") or fields)
    return _Said(
        message=message,
        type=_word(fields.get("type")),
        code=_word(fields.get("code")),
        param=_word(fields.get("param")),
        sizes=sizes_in(message, fields),
        beside=fields_kept(fields),
    )


def _tells_of_overflow(said: _Said, status: int | None) -> bool:
    if said.code == _OVERFLOW_CODE or said.type == _LLAMA_CPPS_TYPE:
        return True
    return status in _OVERFLOW_STATUSES and _OVERFLOW_WORDS.search(said.message) is not None


def _words_of_no_tools(said: _Said, status: int | None) -> str:
    """Return the passage that refuses tools, or nothing."""
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
    """One entry of FastAPI's validation errors."""
    return isinstance(item, dict) and isinstance(item.get("loc"), list) and "msg" in item


def _word(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _status_in(code: str | None) -> int | None:
    return int(code) if code is not None and re.fullmatch("[45][0-9][0-9]", code) else None


def _error_status(status: int | None, overflows: bool) -> int:
    """A redirect or a 200 with an error inside is no status for an error."""
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
