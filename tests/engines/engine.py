"""The interface between the tests and a kind of model server."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from policies.tool_support import NoToolsReason

MODEL = "smollm2"
REQUEST_TIMEOUT_S = 300
WITH_TOOLS = Path(__file__).parent / "templates" / "tools.jinja"
"""A chat template with tools; the model's own template has none."""
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """The server options for tools, and the verdict that the proxy should reach."""

    name: str
    template: Path | None = None
    """Chat template; None selects the model's own."""
    flags: Sequence[str] = ()
    reason: NoToolsReason | None = None
    """The expected reason for not offering tools, if any."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The start parameters of a server."""

    port: int
    tools: Tools
    window: int
    """Context window of one request, in tokens."""
    slots: int
    """Number of concurrent requests."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The names of a server's metrics."""

    prefix: str
    running: str
    waiting: str
    prompt_tokens: str
    completion_tokens: str


@dataclass(frozen=True, slots=True)
class Engine:
    """A kind of model server."""

    name: str
    find: Callable[[], object]
    """Find the installation. Raise NotInstalledError if there is none."""
    command: Callable[[Launch], Sequence[str]]
    gauges: Gauges
    without_tools: Tools
    with_tools: Tools
    count_prompt: Callable[[httpx.AsyncClient, Body], Awaitable[int]]
    """Return the number of prompt tokens of a request."""
    one_of: Callable[[Sequence[str]], Body]
    """Return the request fields that allow only the given answers."""
    window_in: Callable[[Body], int]
    """Return the window size that a context error contains, in tokens."""
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120


def words(options: Mapping[str, object]) -> list[str]:
    """Return options and their values as command-line arguments."""
    return [str(word) for option in options.items() for word in option]
