"""Which requests get a computer and which go straight to the backend."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from policies.profile import Profile

PLAIN_SUFFIX = ":plain"
TASK_HEADER = "x-openwebui-task"
"""Open WebUI names in it what it wants for itself; empty in the requests of its users."""
TINY_TOKENS = 8
"""No answer of a run fits into so few: such requests only look whether the model is there."""
_BEGINNING_CHARS = 300
_TITLE = re.compile(
    r"\b(?:concise|short|brief)\b[^.\n]{0,80}\btitle\b[^.\n]{0,80}"
    r"\b(?:conversation|chat|coding session)\b",
    re.IGNORECASE,
)
"""How chat UIs ask for a chat's title: LibreChat, n8n, Claude Code and others."""
_OPEN_WEBUI_TASK = re.compile(
    r"\A\s*#+ Task:\s[^<]*?(?:\b(?:title|tags|follow-up|queries|autocomplet\w*|emoji)\b"
    r"|\bmessages (?:this|the) user might\b|\bprompt for a[mn]? image generation\b)",
    re.IGNORECASE,
)
"""It wants these of a chat, which stands below in <chat_history>."""
_OPEN_WEBUI_WORK = re.compile(
    r"\A\s*(?:#+ Task:\s+Summarize the conversation history"
    r"|Your task is to reflect the speaker's likely facial expression"
    r"|You have been provided with a set of responses from various models)\b"
)
"""It shortens a chat that has become too long, picks an emoji, makes one answer of several."""
ONE_CALL = (
    *("input_ids", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""vLLM's and SGLang's fields that tell of the state of one very prompt."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and why."""

    kind: Literal["sandbox", "plain", "refused"]
    model: str
    """The backend's own name for the model."""
    reason: str


def plain_name(model: str) -> str:
    """The backend's own name for a model."""
    return model.removesuffix(PLAIN_SUFFIX)


def route(
    body: Mapping[str, Any], headers: Mapping[str, str], profile: Profile = Profile()
) -> Route:
    """Decide from the request and what its client is allowed. `<model>:plain` is the backend's
    model untouched.

    `headers` are in lower case.
    """
    written = str(body.get("model", ""))
    model = plain_name(written)
    asked = "the model's name ends in :plain" if written != model else _one_call(body)
    if profile.computer == "never":
        return Route("plain", model, "computer: never")
    if profile.computer == "always":
        kind: Literal["refused", "sandbox"] = "refused" if asked else "sandbox"
        return Route(kind, model, asked or "computer: always")
    if asked := asked or ("tool_choice forbids tools" if forbids_tools(body) else None):
        return Route("plain", model, asked)
    if _is_utility(body, headers):
        return Route("plain", model, "a chat UI asks for itself")
    if any(fnmatchcase(model, pattern) for pattern in profile.weak_models):
        return Route("plain", model, "the model is among weak_models")
    return Route("sandbox", model, "computer: auto")


def forbids_tools(body: Mapping[str, Any]) -> bool:
    """Whether a request wants no tool called."""
    return body.get("tool_choice") == "none" or body.get("function_call") == "none"


def _one_call(body: Mapping[str, Any]) -> str | None:
    """Why a request can only be answered by one call of the backend's, if so."""
    if _answers_with_more_than_text(body.get("modalities")):
        return "the answer is not text alone"
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "it continues a message that is begun"
    if any(body.get(name) is not None for name in ONE_CALL):
        return "it belongs to one call of one server"
    return None


def _answers_with_more_than_text(modalities: Any) -> bool:
    return isinstance(modalities, list) and any(each != "text" for each in modalities)


def _is_utility(body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether it is no question of a user: titles, tags and suggestions need no computer."""
    task = headers.get(TASK_HEADER, "").strip()
    if task and not task.startswith("{{"):  # a version that does not fill the name in
        return True
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    if any(isinstance(limit, int) and 0 < limit <= TINY_TOKENS for limit in limits):
        return True
    if body.get("tools"):
        return False
    messages = [each for each in body.get("messages") or [] if isinstance(each, Mapping)]
    said = [each.get("content") for each in (*messages[:1], *messages[-1:])]
    return any(isinstance(text, str) and _asks_for_utility(text) for text in said)


def _asks_for_utility(text: str) -> bool:
    beginning = text[:_BEGINNING_CHARS]
    if _TITLE.search(beginning) or _OPEN_WEBUI_WORK.match(beginning):
        return True
    return "<chat_history>" in text and _OPEN_WEBUI_TASK.search(beginning) is not None
