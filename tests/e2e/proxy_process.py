"""Run the real `sandbox-proxy` command as a process."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import yaml
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from tests.fakes.server import Kind
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 40.0
ADDRESS = re.compile(r"http://[\w.:\[\]]+:\d+")


def state_dir(home: Path) -> Path:
    """Return the data directory of a command that runs in `home`."""
    return home / "state" / "llm-sandbox-proxy"


def environment(home: Path, **variables: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state")}
    return {**os.environ, **own, **variables}


def write_config(home: Path, tree: dict[str, Any] | str) -> str:
    """Write config.yaml and return its path."""
    path = home / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


async def run(
    home: Path,
    *arguments: str,
    timeout_s: float = RUN_TIMEOUT_S,
    prefix: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run the command until it exits. `prefix` is a command that executes the command after it."""
    with anyio.fail_after(timeout_s):
        return await anyio.run_process(
            [*prefix, sys.executable, "-m", "proxy", *arguments],
            check=False,
            cwd=home,
            env=environment(home, **variables),
        )


class Server:
    """A running `serve` process."""

    def __init__(self, process: Process, url: str, log: str) -> None:
        """`log` is the log up to the moment when the server was ready."""
        self.process = process
        self.url = url
        self.log = log

    async def ended(self) -> int:
        """Wait for the process and return its exit code."""
        return await self.process.wait()


@asynccontextmanager
async def serving(
    home: Path,
    kind: Kind | Literal["auto"],
    backend_url: str,
    more: Mapping[str, Any] | None = None,
    port: int = 0,
    start_timeout_s: float = START_TIMEOUT_S,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
    **variables: str,
) -> AsyncIterator[Server]:
    """Run `serve` on a port, or on a free port; `more` is merged into its config.yaml. `prefix` is
    a command that executes the command after it, and `options` are more options of `serve`.

    Tools are offered without a probe, so the backend receives only what clients cause, unless
    `more` changes `tool_support`.
    """
    tree: dict[str, Any] = {"sandbox": {"docker": {"image": DOCKER_IMAGE}}, **(more or {})}
    tree["backend"] = {"tool_support": "always", **tree.get("backend", {})}
    config = write_config(home, tree)
    where = ("--port", str(port), "--sandbox", kind, "--backend-url", backend_url)
    process = await anyio.open_process(
        [*prefix, sys.executable, "-m", "proxy", "serve", "--config", config, *where, *options],
        cwd=home,
        env=environment(home, **variables),
    )
    try:
        yield Server(process, *await _start(process, start_timeout_s))
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def _start(process: Process, timeout_s: float) -> tuple[str, str]:
    """Return the URL that the server logs when it is ready, and its log up to there."""
    assert process.stderr is not None
    output = ""
    with anyio.fail_after(timeout_s):
        async for text in TextReceiveStream(process.stderr):
            output += text
            if found := re.search(rf"serving at ({ADDRESS.pattern})\b.*\n", output):
                return found[1], output
    raise AssertionError(f"serve ended before it was ready: {output}")
