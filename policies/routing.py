"""Which requests get a computer and which go straight to the backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PLAIN_SUFFIX = ":plain"
ONE_CALL = (
    *("input_ids", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""vLLM's and SGLang's fields that tell of the state of one very prompt."""


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
    if reason := _straight(body):
        return Route("plain", model, reason)
    return Route("sandbox", model, "default")


def _straight(body: Mapping[str, Any]) -> str | None:
    """Why a request can only be answered by one call of the backend's, if so."""
    if body.get("tool_choice") == "none" or body.get("function_call") == "none":
        return "tool_choice forbids tools"
    if _answers_with_more_than_text(body.get("modalities")):
        return "the answer is not text alone"
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "it continues a message that is begun"
    if any(body.get(name) is not None for name in ONE_CALL):
        return "it belongs to one call of one server"
    return None


def _answers_with_more_than_text(modalities: Any) -> bool:
    return isinstance(modalities, list) and any(each != "text" for each in modalities)
