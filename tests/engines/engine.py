"""What the tests need to know of a model server, whichever it is."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from policies.tool_support import NoToolsReason

MODEL = "smollm2"
REQUEST_TIMEOUT_S = 300
WITH_TOOLS = Path(__file__).parent / "templates" / "tools.jinja"
"""A chat template that tells the model of its tools; the model's own does not."""
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """How a server is started as to tools, and what the proxy finds out about that."""

    name: str
    template: Path | None = None
    """None is the model's own."""
    flags: Sequence[str] = ()
    reason: NoToolsReason | None = None
    """Why a model gets no tools there."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with."""

    port: int
    tools: Tools
    window: int
    """Tokens for a request."""
    slots: int
    """Requests it works on at the same time."""


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
    """Raises NotInstalledError."""
    command: Callable[[Launch], Sequence[str]]
    gauges: Gauges
    without_tools: Tools
    with_tools: Tools
    count_prompt: Callable[[httpx.AsyncClient, Body], Awaitable[int]]
    """Tokens of the prompt that a request becomes."""
    one_of: Callable[[Sequence[str]], Body]
    """The field that leaves the model these answers alone."""
    window_in: Callable[[Body], int]
    """The window's tokens, as an error says that they are too few."""
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120


def words(options: Mapping[str, object]) -> list[str]:
    """Return a command's options and their values as its arguments."""
    return [str(word) for option in options.items() for word in option]
