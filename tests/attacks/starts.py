"""Starts that would leave the server open: `serve` must refuse each of them."""

import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks.report import Finding
from tests.e2e.proxy_process import run, write_config

_TWO_KEYS = [{"name": "a", "env": "KEY_A"}, {"name": "b", "env": "KEY_B"}]
_NO_ENGINE = "unix:///nonexistent/docker.sock"
_BUBBLEWRAP = {"sandbox": {"backend": "bubblewrap"}}


@dataclass(frozen=True, slots=True)
class _Start:
    """A configuration that `serve` must refuse."""

    name: str
    message: str
    """A part of the message that names the reason."""
    settings: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


_STARTS = (
    _Start("--host 0.0.0.0 without keys", "--allow-open", _BUBBLEWRAP, ("--host", "0.0.0.0")),
    _Start("--host :: without keys", "--allow-open", _BUBBLEWRAP, ("--host", "::")),
    _Start(
        "two keys with passthrough: all",
        "backend.passthrough",
        {**_BUBBLEWRAP, "backend": {"passthrough": "all"}, "keys": _TWO_KEYS},
        variables={"KEY_A": "sk-a", "KEY_B": "sk-b"},
    ),
    _Start(
        "two keys with one secret",
        "same secret",
        {**_BUBBLEWRAP, "keys": _TWO_KEYS},
        variables={"KEY_A": "sk-a", "KEY_B": "sk-a"},
    ),
    _Start(
        "a key whose variable is not set",
        "KEY_B",
        {**_BUBBLEWRAP, "keys": _TWO_KEYS},
        variables={"KEY_A": "sk-a"},
    ),
    _Start(
        "docker.host without an engine",
        "docker",
        {"sandbox": {"docker": {"host": _NO_ENGINE}}},
    ),
    _Start("DOCKER_HOST without an engine", "docker", {}, variables={"DOCKER_HOST": _NO_ENGINE}),
    _Start(
        "a runtime that the engine lacks",
        "runtime",
        {"sandbox": {"docker": {"runtime": "runsc-missing"}}},
    ),
)


async def attacks() -> AsyncIterator[Finding]:
    """Start the server with each configuration and wait for its exit."""
    for start in _STARTS:
        with tempfile.TemporaryDirectory(prefix="attacks-") as home:
            yield await _try_start(start, Path(home))


async def _try_start(start: _Start, home: Path) -> Finding:
    config = write_config(home, dict(start.settings))
    arguments = ("serve", "--config", config, "--port", "0", *start.arguments)
    try:
        ended = await run(home, *arguments, **start.variables)
    except TimeoutError:
        return Finding(start.name, "-", False, "the server serves")
    message = re.sub(r"\s+", " ", ended.stderr.decode(errors="replace")).strip()
    held = ended.returncode != 0 and start.message.lower() in message.lower()
    figures = f"exit code {ended.returncode}: {message.removeprefix('sandbox-proxy: ')[:90]}"
    return Finding(start.name, "-", held, figures)
