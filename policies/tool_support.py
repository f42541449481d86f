"""Verdicts on the tool support of models: reasons, validity and error messages."""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from policies.hosts import is_public

ToolSupport = Literal["probe", "always", "never"]
"""probe: test each model and store the verdict. always: every model gets tools. never: no model
gets tools."""
NoToolsReason = Literal["no_tool_support", "tools_ignored", "tools_refused", "tools_failed"]
"""The reason why a model gets no tools. no_tool_support: the operator's setting. tools_ignored: the
chat template leaves tools out of the prompt. tools_refused: the backend refuses requests with
tools. tools_failed: tool calls failed in runs of the same key."""

VERSION_CHECK_INTERVAL_S = 600.0
"""Seconds between two checks of whether the backend's inference engine, such as vLLM, still has the
version for which a model's verdict was found."""
UNVERSIONED_VERDICT_TTL_S = 24 * 3600.0
"""Seconds until a verdict expires if the engine reports no version."""
FAILED_TOOLS_VERDICT_TTL_S = 3600.0
"""Seconds that a key gets no tools after tool calls failed in one of its runs."""
_MAX_QUOTED_CHARS = 300
"""Maximum length of the quotation of a backend's refusal."""
_LOCAL_ENDINGS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc")

_NEVER_MESSAGE = "backend.tool_support is never for the model {model!r}."
_IGNORED_MESSAGE = (
    "The chat template of the model {model!r} leaves tools out of the prompt. Start its server with"
    " a chat template that renders `tools` (vLLM, SGLang: --chat-template FILE; llama.cpp: --jinja"
    " --chat-template-file FILE), or set backend.tool_support: always."
)
_REFUSED_MESSAGE = (
    "The backend refuses tools for the model {model!r} ({error}). {change}, or set"
    " backend.tool_support: never."
)
_REMEDIES = (
    (
        "--tool-call-parser",
        "Start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER (hermes for Qwen"
        " models)",
    ),
    ("--jinja", "Start llama.cpp's server with --jinja"),
    ("", "Serve a model, or a template, that supports tools"),
)
"""Instructions for the operator, by a word in the backend's refusal."""
_FAILED_MESSAGE = (
    "The model {model!r} failed at tools in a run of this key in the last hour ({trouble}). Use a"
    " larger model, see whether the server's tool call parser fits the model, or set"
    " backend.tool_support: always."
)


@dataclass(frozen=True, slots=True)
class ToolVerdict:
    """A verdict on the tool support of a model."""

    reason: NoToolsReason | None = None
    """None if the model gets tools."""
    message: str = ""
    """An explanation of the reason, and a change by which the operator can give the model tools.
    Empty if the model gets tools."""

    @property
    def header_value(self) -> str:
        """The message in ASCII on one line, for an HTTP header."""
        return " ".join(self.message.encode("ascii", "replace").decode().split())


SUPPORTED = ToolVerdict()


@dataclass(frozen=True, slots=True)
class KnownVerdict:
    """A stored verdict that applies to all keys."""

    verdict: ToolVerdict
    version: str | None
    """The engine's version, if the engine reports it."""
    found_at: float
    """Time of the verdict, in seconds since 1970."""

    def is_outdated(self, version: str | None, now: float) -> bool:
        """Return True if the engine's version has changed, or if the version is unknown and the
        verdict is a day old."""
        if version is None or self.version is None:
            return version != self.version or now - self.found_at >= UNVERSIONED_VERDICT_TTL_S
        return version != self.version


def disabled_verdict(model: str) -> ToolVerdict:
    """Return the verdict of the setting `tool_support: never`."""
    return ToolVerdict("no_tool_support", _NEVER_MESSAGE.format(model=model))


def tools_ignored_verdict(model: str) -> ToolVerdict:
    """Return the verdict on a model whose chat template leaves tools out."""
    return ToolVerdict("tools_ignored", _IGNORED_MESSAGE.format(model=model))


def tools_refused_verdict(model: str, error: str) -> ToolVerdict:
    """Return the verdict on a model whose backend refuses tools with this error message."""
    change = next(change for word, change in _REMEDIES if word in error)
    error = " ".join(error[:_MAX_QUOTED_CHARS].split()).rstrip(".")
    return ToolVerdict(
        "tools_refused", _REFUSED_MESSAGE.format(model=model, error=error, change=change)
    )


def tools_failed_verdict(model: str, trouble: Collection[str]) -> ToolVerdict:
    """Return the verdict on a model whose tool calls failed. `trouble` names the kinds of
    failures."""
    signs = ", ".join(sorted(trouble)).replace("_", " ")
    return ToolVerdict("tools_failed", _FAILED_MESSAGE.format(model=model, trouble=signs))


def shows_no_tool_support(trouble: Collection[str], *, has_run_commands: bool) -> bool:
    """Return True if the kinds of tool failures in a run (`trouble`) show that the model cannot use
    tools. Malformed calls do not count if the run also ran commands."""
    counted = set(trouble) - ({"malformed_call"} if has_run_commands else set())
    return bool(counted)


def is_local(url: str) -> bool:
    """Return True if the host in the URL is not public. The operator then runs the server, and its
    token counts can be trusted. A public server may count something else than the tokens of the
    model's prompt."""
    host = urlsplit(url).hostname or ""
    try:
        return not is_public(ip_address(host))
    except ValueError:
        return "." not in host or host.endswith(_LOCAL_ENDINGS)
