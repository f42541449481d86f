"""Whether a model is given tools: what decides it, how long that holds, what is said of it."""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from policies.hosts import is_public

ToolSupport = Literal["probe", "always", "never"]
"""probe: find out and remember; always: every model is given tools; never: none is."""
NoToolsReason = Literal["no_tool_support", "tools_ignored", "tools_refused", "tools_failed"]
"""Why a model is given no tools: the operator says so; the chat template leaves tools out of the
prompt; the backend refuses requests with tools; tool calls failed in runs of the same key."""

CHECK_EVERY_S = 600.0
"""How long a verdict is taken for granted; then the engine's version is asked for again."""
HOLDS_WITHOUT_VERSION_S = 24 * 3600.0
EVIDENCE_HOLDS_S = 3600.0
"""How long tool calls that failed in runs of a key keep tools from that key."""
MAX_SAID_CHARS = 300
"""How much of a backend's refusal a verdict quotes."""
_LOCAL_ENDINGS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc")

_NEVER = "backend.tool_support is never for the model {model!r}."
_IGNORED = (
    "The chat template of the model {model!r} leaves tools out of the prompt. Start its server with"
    " a chat template that renders `tools` (vLLM, SGLang: --chat-template FILE; llama.cpp: --jinja"
    " --chat-template-file FILE), or set backend.tool_support: always."
)
_REFUSED = (
    "The backend refuses tools for the model {model!r} ({said}). {change}, or set"
    " backend.tool_support: always."
)
_CHANGES = (
    (
        "--tool-call-parser",
        "Start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER (hermes for Qwen"
        " models)",
    ),
    ("--jinja", "Start llama.cpp's server with --jinja"),
    ("", "Serve a model, or a template, that supports tools"),
)
"""What to change, by what the refusal has in it."""
_FAILED = (
    "The model {model!r} failed at tools in a run of this key in the last hour ({trouble}). Use a"
    " larger model, see whether the server's tool call parser fits the model, or set"
    " backend.tool_support: always."
)


@dataclass(frozen=True, slots=True)
class ToolVerdict:
    """Whether a model is given tools, and if not, why, and what to change."""

    reason: NoToolsReason | None = None
    message: str = ""

    @property
    def header_value(self) -> str:
        """The words as an HTTP header can carry them."""
        return " ".join(self.message.encode("ascii", "replace").decode().split())


SUPPORTED = ToolVerdict()


@dataclass(frozen=True, slots=True)
class KnownVerdict:
    """A verdict that holds for everybody."""

    verdict: ToolVerdict
    version: str | None
    """The engine's, where it tells one."""
    found_at: float
    """In seconds since 1970."""

    def is_outdated(self, version: str | None, now: float) -> bool:
        """Return True if the engine's version has changed, or if none is known and the verdict is a
        day old."""
        if version is None or self.version is None:
            return version != self.version or now - self.found_at >= HOLDS_WITHOUT_VERSION_S
        return version != self.version


def disabled_verdict(model: str) -> ToolVerdict:
    """The verdict of `tool_support: never`."""
    return ToolVerdict("no_tool_support", _NEVER.format(model=model))


def ignored_verdict(model: str) -> ToolVerdict:
    """The verdict on a model whose chat template renders no tools."""
    return ToolVerdict("tools_ignored", _IGNORED.format(model=model))


def refused_verdict(model: str, said: str) -> ToolVerdict:
    """The verdict on a model whose backend refuses tools in these words."""
    change = next(change for word, change in _CHANGES if word in said)
    said = " ".join(said[:MAX_SAID_CHARS].split()).rstrip(".")
    return ToolVerdict("tools_refused", _REFUSED.format(model=model, said=said, change=change))


def failed_verdict(model: str, trouble: Collection[str]) -> ToolVerdict:
    """The verdict on a model that was in trouble with tools."""
    words = ", ".join(sorted(trouble)).replace("_", " ")
    return ToolVerdict("tools_failed", _FAILED.format(model=model, trouble=words))


def is_evidence(trouble: Collection[str], *, has_run_commands: bool) -> bool:
    """Return True if a run's trouble shows that the model cannot use tools. Malformed calls do not
    count if the run also ran commands."""
    counted = set(trouble) - ({"malformed_call"} if has_run_commands else set())
    return bool(counted)


def is_local(url: str) -> bool:
    """Whether a server is one of the operator's own, as far as its address tells: what a hosted
    provider counts as prompt need not be what the model is given."""
    host = urlsplit(url).hostname or ""
    try:
        return not is_public(ip_address(host))
    except ValueError:
        return "." not in host or host.endswith(_LOCAL_ENDINGS)
