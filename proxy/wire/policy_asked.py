"""What a request asks for of the policies that hold for it: a profile, or less than it has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import BadRequestError
from proxy.wire.validation import mapping, text

PROFILE_HEADER, COMPUTER_HEADER, PROMPT_HEADER = (
    "x-sandbox-profile",
    "x-sandbox-computer",
    "x-sandbox-prompt",
)
OTHERS = frozenset(
    {
        *("profile", "steps", "documents", "usage", "deadline_s", "on_disconnect"),
        *("session", "container_id", "file_ids"),
    }
)
"""What else may stand there, for others to read."""
SETTINGS = ("computer", "prompt", "limits", "isolation", "inputs", "observation", "artifacts")
"""What may stand in the body's `sandbox`, in the shape that a profile has."""


@dataclass(frozen=True, slots=True)
class PolicyAsked:
    """By its body or its headers."""

    profile: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def policy_asked(body: Mapping[str, Any], headers: Mapping[str, str]) -> PolicyAsked:
    """Read it; `headers` are found in lower case. Raises BadRequestError."""
    ours = body.get("sandbox") or {}
    mapping(ours, "sandbox")
    if unknown := ours.keys() - OTHERS - set(SETTINGS):
        raise BadRequestError(
            f"Unknown parameter: 'sandbox.{min(unknown)}'.",
            param=f"sandbox.{min(unknown)}",
            code="unknown_parameter",
        )
    told = {
        name: said
        for name, header in (("computer", COMPUTER_HEADER), ("prompt", PROMPT_HEADER))
        if (said := headers.get(header))
    }
    told |= {name: ours[name] for name in SETTINGS if ours.get(name) is not None}
    name = ours.get("profile") or headers.get(PROFILE_HEADER) or None
    if name is not None:
        text(name, "sandbox.profile")
    return PolicyAsked(name, told)
