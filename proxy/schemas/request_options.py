"""Options of a request that every API shares, from the body's `sandbox` object and from headers.

They set the deadline, what happens to the run when the client disconnects or retries, how steps and
usage are shown, and whether documents may become files.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.steps import CHOICES, PROFILES, Steps, UsageOf, is_choice, is_profile, suited_usage
from proxy.errors import BadRequestError
from proxy.schemas.validation import boolean, mapping

OnDisconnect = Literal["cancel", "detach"]
_COUNT = re.compile(r"[0-9]{1,9}")
DOCUMENTS_HEADER = "x-sandbox-documents"
PATIENCE_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""The timeouts of OpenAI's SDKs: for the next byte (Python), or for the first (Node)."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request."""

    deadline_s: float | None = None
    """Seconds after which the client no longer wants an answer."""
    patience_s: float | None = None
    """Seconds without a byte after which the client hangs up."""
    on_disconnect: OnDisconnect | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    """The number of earlier attempts, or None if the client does not send it."""

    @property
    def client_timeout_s(self) -> float | None:
        """Seconds after which a client that receives nothing has hung up, or None."""
        ends = (end for end in (self.deadline_s, self.patience_s) if end is not None)
        return min(ends, default=None)


def read_terms(body: Mapping[str, Any], headers: Mapping[str, str]) -> RequestOptions:
    """Return the options. `headers` have lower-case names. Raises BadRequestError."""
    ours = body.get("sandbox") or {}
    mapping(ours, "sandbox")
    deadlines = [
        _seconds(ours.get("deadline_s"), "sandbox.deadline_s"),
        _seconds(headers.get("x-sandbox-deadline"), "X-Sandbox-Deadline"),
    ]
    # A library sends these two, not a person: an unreadable value is ignored.
    patience = (_number(headers.get(name)) for name in PATIENCE_HEADERS)
    retries = headers.get("x-stainless-retry-count", "")
    return RequestOptions(
        deadline_s=min((found for found in deadlines if found is not None), default=None),
        patience_s=next((found for found in patience if found is not None and found > 0), None),
        on_disconnect=_on_disconnect(ours.get("on_disconnect"), "sandbox.on_disconnect")
        or _on_disconnect(headers.get("x-sandbox-on-disconnect"), "X-Sandbox-On-Disconnect"),
        idempotency_key=headers.get("idempotency-key") or None,
        retry_count=int(retries) if _COUNT.fullmatch(retries) else None,
    )


def steps_asked(body: Mapping[str, Any], headers: Mapping[str, str]) -> Steps | None:
    """Return how steps are to be shown, or None. Raises BadRequestError."""
    ours = body.get("sandbox")
    asked, param = ours.get("steps") if isinstance(ours, dict) else None, "sandbox.steps"
    if not asked:
        asked, param = headers.get("x-sandbox-steps"), "X-Sandbox-Steps"
    if not asked:
        return None
    if is_profile(asked):
        return asked
    raise _not_among(asked, PROFILES, param)


def documents_wanted(body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Return True if documents in long texts may become files. Raises BadRequestError."""
    ours = body.get("sandbox")
    asked = ours.get("documents") if isinstance(ours, dict) else None
    if asked is not None:
        boolean(asked, "sandbox.documents")
        return bool(asked)
    told = headers.get(DOCUMENTS_HEADER, "on").lower()
    if told not in ("on", "off"):
        raise _not_among(told, ("on", "off"), "X-Sandbox-Documents")
    return told == "on"


def usage_asked(body: Mapping[str, Any], headers: Mapping[str, str]) -> UsageOf:
    """Return which model calls the usage counts. Raises BadRequestError."""
    ours = body.get("sandbox")
    asked, param = ours.get("usage") if isinstance(ours, dict) else None, "sandbox.usage"
    if not asked:
        asked, param = headers.get("x-sandbox-usage"), "X-Sandbox-Usage"
    if not asked:
        return suited_usage(headers)
    if is_choice(asked):
        return asked
    raise _not_among(asked, CHOICES, param)


def _not_among(asked: object, words: Iterable[str], param: str) -> BadRequestError:
    return BadRequestError(
        f"Invalid value {asked!r} for '{param}': one of {', '.join(map(repr, words))}.",
        param=param,
        code="invalid_value",
    )


def _on_disconnect(value: object, param: str) -> OnDisconnect | None:
    if value is None:
        return None
    if value == "cancel":
        return "cancel"
    if value == "detach":
        return "detach"
    raise BadRequestError(
        f"Invalid value {value!r} for '{param}': 'cancel' or 'detach'.",
        param=param,
        code="invalid_value",
    )


def _seconds(value: object, param: str) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None or number <= 0:
        raise BadRequestError(
            f"Invalid value {value!r} for '{param}': a number of seconds above 0.",
            param=param,
            code="invalid_value",
        )
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
