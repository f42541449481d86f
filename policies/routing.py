"""Routing: which requests get a sandbox and which go straight to the backend."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from policies.profile import Profile
from policies.tool_support import NoToolsReason
from policies.utility_requests import is_utility_request

RouteReason = Literal[
    NoToolsReason,
    "auto",
    "always",
    "never",
    "plain_suffix",
    "not_text",
    "continued_message",
    "backend_state",
    "tool_choice_none",
    "utility",
    "skip_models",
]
"""The reason why a request gets a sandbox or no sandbox. These words are part of the API."""
ROUTE_REASONS: tuple[RouteReason, ...] = get_args(RouteReason)
REASON_SENTENCES: Mapping[RouteReason, str] = {
    "auto": "enabled: auto",
    "always": "enabled: always",
    "never": "enabled: never",
    "plain_suffix": "the model's name ends in :plain",
    "not_text": "the request asks for output other than text",
    "continued_message": "the request continues an unfinished message",
    "backend_state": "the request refers to state of the backend",
    "tool_choice_none": "tool_choice forbids tools",
    "utility": "a chat client sent the request for its own use",
    "skip_models": "the model is among skip_models",
    "no_tool_support": "backend.tool_support: never",
    "tools_ignored": "the model's chat template leaves tools out of the prompt",
    "tools_refused": "the backend refuses tools for the model",
    "tools_failed": "tool calls of the model failed in a run of this key in the last hour",
}
"""Explanations of the reasons, for error messages and headers."""

PLAIN_SUFFIX = ":plain"
BACKEND_STATE_FIELDS = (
    *("input_ids", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""Fields of vLLM and SGLang for a single prompt, such as its token ids or its state in the backend.
A run, which sends several prompts, cannot use them."""
_SUBPATH = re.compile(r"(?:/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]{0,255}){0,32}/?")


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a request, with the reason."""

    kind: Literal["sandbox", "plain", "refused"]
    """sandbox: the request gets a sandbox. plain: the request goes straight to the backend.
    refused: the profile demands a sandbox, which the request or its model cannot use."""
    model: str
    """The backend's name for the model."""
    reason: RouteReason

    @property
    def explanation(self) -> str:
        """A short explanation of the reason, for clients."""
        return REASON_SENTENCES[self.reason]


def backend_model_name(model: str) -> str:
    """Return the backend's name for a model: the name without the suffix `:plain`."""
    return model.removesuffix(PLAIN_SUFFIX)


def choose_route(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    profile: Profile = Profile(),
    no_tools: NoToolsReason | None = None,
) -> Route:
    """Return the route of a request under a profile.

    `<model>:plain` never gets a sandbox. `no_tools` is the reason why the model gets no tools, or
    None; with `enabled: always`, the reason tools_failed is ignored. The names of `headers` are in
    lower case.
    """
    requested_model = str(body.get("model", ""))
    model = backend_model_name(requested_model)
    plain: RouteReason | None = (
        "plain_suffix" if requested_model != model else _single_call_reason(body)
    )
    if profile.enabled == "never":
        return Route("plain", model, "never")
    if profile.enabled == "always":
        plain = plain or (no_tools if no_tools != "tools_failed" else None)
        return Route("refused", model, plain) if plain else Route("sandbox", model, "always")
    if plain := plain or ("tool_choice_none" if forbids_tools(body) else None):
        return Route("plain", model, plain)
    if is_utility_request(body, headers):
        return Route("plain", model, "utility")
    if any(fnmatchcase(model, pattern) for pattern in profile.skip_models):
        return Route("plain", model, "skip_models")
    if no_tools:
        return Route("plain", model, no_tools)
    return Route("sandbox", model, "auto")


def forbids_tools(body: Mapping[str, Any]) -> bool:
    """Return True if a request forbids tool calls."""
    return body.get("tool_choice") == "none" or body.get("function_call") == "none"


def _single_call_reason(body: Mapping[str, Any]) -> RouteReason | None:
    """Return the reason why a request needs a single model call instead of a run, or None."""
    modalities = body.get("modalities")
    if isinstance(modalities, list) and any(modality != "text" for modality in modalities):
        return "not_text"
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "continued_message"
    if any(body.get(name) is not None for name in BACKEND_STATE_FIELDS):
        return "backend_state"
    return None


def is_allowed_upstream(url: str, base_urls: Sequence[str]) -> bool:
    """Return True if a URL is an allowed base URL, or below an allowed base URL.

    The part of the URL after the base must have no query, no escapes and no segment that begins
    with a dot. Otherwise servers might resolve the URL to another path.
    """
    return any(
        url.startswith(base) and _SUBPATH.fullmatch(url, len(base))
        for base in (each.rstrip("/") for each in base_urls)
    )
