"""What a request in any dialect says of how it wants to be served: until when, and what becomes of
its run when its client leaves or asks again."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.steps import PROFILES, Steps, is_profile
from policies.usage import CHOICES, UsageOf, is_choice, suited_usage
from proxy.errors import BadRequestError
from proxy.wire.validation import boolean, mapping

OnDisconnect = Literal["cancel", "detach"]
_COUNT = re.compile(r"[0-9]{1,9}")
DOCUMENTS_HEADER = "x-sandbox-documents"
PATIENCE_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""How long OpenAI's SDKs wait for the next byte (Python), or for the first (Node)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One request's."""

    deadline_s: float | None = None
    """When the client wants its answer, at the latest."""
    patience_s: float | None = None
    """How long it waits in silence before it hangs up."""
    on_disconnect: OnDisconnect | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    """Which repetition this is, from 0; None where the client does not tell."""

    @property
    def hangs_up_s(self) -> float | None:
        """When a client that hears nothing is gone."""
        ends = (end for end in (self.deadline_s, self.patience_s) if end is not None)
        return min(ends, default=None)


def read_terms(body: Mapping[str, Any], headers: Mapping[str, str]) -> Terms:
    """Read them; `headers` are found in lower case. Raises BadRequestError."""
    ours = body.get("sandbox") or {}
    mapping(ours, "sandbox")
    deadlines = [
        _seconds(ours.get("deadline_s"), "sandbox.deadline_s"),
        _seconds(headers.get("x-sandbox-deadline"), "X-Sandbox-Deadline"),
    ]
    # These two come from a library, not from a person: what cannot be read is left alone.
    patience = (_number(headers.get(name)) for name in PATIENCE_HEADERS)
    retries = headers.get("x-stainless-retry-count", "")
    return Terms(
        deadline_s=min((found for found in deadlines if found is not None), default=None),
        patience_s=next((found for found in patience if found is not None and found > 0), None),
        on_disconnect=_on_disconnect(ours.get("on_disconnect"), "sandbox.on_disconnect")
        or _on_disconnect(headers.get("x-sandbox-on-disconnect"), "X-Sandbox-On-Disconnect"),
        idempotency_key=headers.get("idempotency-key") or None,
        retry_count=int(retries) if _COUNT.fullmatch(retries) else None,
    )


def steps_asked(body: Mapping[str, Any], headers: Mapping[str, str]) -> Steps | None:
    """The profile that the request names, in its body or by header. Raises BadRequestError."""
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
    """Whether documents in long texts may become files. Raises BadRequestError."""
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
    """Which calls the usage is to be of. Raises BadRequestError."""
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
