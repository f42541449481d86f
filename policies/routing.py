"""Which requests get a computer and which go straight to the backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PLAIN_SUFFIX = ":plain"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and why."""

    kind: Literal["sandbox", "plain"]
    model: str
    """The backend's own name for the model."""
    reason: str


def route(body: Mapping[str, Any]) -> Route:
    """Decide from the request alone. `<model>:plain` is the backend's model untouched."""
    model = str(body.get("model", ""))
    if model.endswith(PLAIN_SUFFIX):
        return Route("plain", model.removesuffix(PLAIN_SUFFIX), "the model's name ends in :plain")
    if body.get("tool_choice") == "none":
        return Route("plain", model, "tool_choice forbids tools")
    if body.get("functions"):
        return Route("plain", model, "the deprecated `functions` cannot be mixed with tools")
    return Route("sandbox", model, "default")
