"""The real command, as a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import yaml
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from tests.fakes.server import Kind
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"http://[\w.:\[\]]+:\d+")


def state_dir(home: Path) -> Path:
    """Where a command that runs at `home` keeps its state."""
    return home / "state" / "llm-sandbox-proxy"


def environment(home: Path, **variables: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state")}
    return {**os.environ, **own, **variables}


def configured(home: Path, tree: dict[str, Any] | str) -> str:
    """A config.yaml with that content; its path."""
    path = home / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


async def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end."""
    with anyio.fail_after(40):
        return await anyio.run_process(
            [sys.executable, "-m", "proxy", *arguments],
            check=False,
            cwd=home,
            env=environment(home, **variables),
        )


class Server:
    """A running `serve`."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url

    async def ended(self) -> int:
        """The exit code, once there is one."""
        return await self.process.wait()


@asynccontextmanager
async def serving(
    home: Path,
    kind: Kind,
    backend_url: str,
    more: Mapping[str, Any] | None = None,
    **variables: str,
) -> AsyncIterator[Server]:
    """`serve` on a free port, ended with the block; `more` goes into its config.yaml. The backend
    is asked for what clients ask alone, unless `more` says otherwise."""
    tree: dict[str, Any] = {"sandbox": {"docker": {"image": DOCKER_IMAGE}}, **(more or {})}
    tree["backend"] = {"tool_support": "always", **tree.get("backend", {})}
    config = configured(home, tree)
    where = ("--port", "0", "--sandbox", kind, "--backend-url", backend_url)
    process = await anyio.open_process(
        [sys.executable, "-m", "proxy", "serve", "--config", config, *where],
        cwd=home,
        env=environment(home, **variables),
    )
    try:
        yield Server(process, await _address(process))
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def _address(process: Process) -> str:
    """What the server says it is to be reached at."""
    assert process.stderr is not None
    said = ""
    with anyio.fail_after(30):
        async for text in TextReceiveStream(process.stderr):
            said += text
            if found := re.search(rf"serving at ({ADDRESS.pattern})\b.*\n", said):
                return found[1]
    raise AssertionError(f"it ended before it served: {said}")
