"""`python -m proxy serve` as a process with two client keys, whose memory and log are watched."""

import asyncio
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import sandbox_runtime
from bench.load import is_answering
from bench.neighbours import BACKENDS
from bench.runs import POOL_STATE
from bench.servers import ROOT, START_TIMEOUT_S, free_port, run_process
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

ATTACKER, NEIGHBOUR, OPERATOR = "sk-attacker", "sk-neighbour", "sk-operator"
_KEYS = {"ATTACKER_KEY": ATTACKER, "NEIGHBOUR_KEY": NEIGHBOUR, "OPERATOR_KEY": OPERATOR}
_READY_SANDBOXES = 2
_UNLIMITED = 1_000_000_000
"""Turns, commands and tokens of one run: the neighbour works as long as the attack lasts."""
_SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class AttackedServer:
    """A running server."""

    pid: int
    port: int
    log: Path
    """The file with the server's log."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset_peak(self) -> None:
        """Let `peak_mib` count from now on. Needs root, or the server's user."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")

    def peak_mib(self) -> float:
        """Return the peak resident memory of the server's process, in MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def open_files(self) -> int:
        """Return the number of descriptors that the server's process has open."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def tracebacks(self) -> int:
        """Return the number of tracebacks in the log: errors that the server did not expect."""
        return self.log.read_text(encoding="utf-8", errors="replace").count("Traceback (most")

    async def settle(self) -> None:
        """Wait until the pool has its ready sandboxes and no other sandbox exists. Raises
        TimeoutError."""
        wanted = {"starting": 0, "idle": _READY_SANDBOXES, "in_use": 0, "ending": 0}
        headers = {"authorization": f"Bearer {OPERATOR}"}
        async with asyncio.timeout(_SETTLE_TIMEOUT_S), httpx.AsyncClient() as client:
            while True:
                metrics = await client.get(f"{self.url}/metrics", headers=headers)
                states = re.findall(POOL_STATE, metrics.text, re.MULTILINE)
                if {state: float(number) for state, number in states} == wanted:
                    return
                await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def attacked_server(
    backend: str,
    model_url: str,
    settings: Mapping[str, Any] | None = None,
    *,
    agent: bytes | None = None,
) -> AsyncIterator[AttackedServer]:
    """Run `serve` with the backend of this name in BACKENDS.

    `settings` are further sections of config.yaml. `agent` is a program that the server starts in
    sandboxes in place of the guest agent. Raises RuntimeError if the server does not start.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="attacks-") as directory:
        home = Path(directory)
        config, log = home / "config.yaml", home / "log"
        tree = _config(backend, model_url, port, home)
        config.write_text(json.dumps(_merged(tree, settings or {})), encoding="utf-8")
        code = ROOT if agent is None else _code_with_agent(home, agent)
        # -P, because the directory of `-m` would come before the code with another agent.
        command = [sys.executable, "-P", "-m", "proxy", "serve", "--config", str(config)]
        env = {**_KEYS, "PYTHONPATH": f"{code}{os.pathsep}{ROOT}"}
        with log.open("wb") as output:
            async with run_process(command, stdout=output, stderr=output, env=env) as child:
                server = AttackedServer(child.pid, port, log)
                started = time.monotonic()
                while not await is_answering(port, "/health"):
                    late = time.monotonic() - started > START_TIMEOUT_S
                    if child.returncode is not None or late:
                        raise RuntimeError(f"serve does not start: {log.read_text()[-600:]}")
                    await asyncio.sleep(_POLL_S)
                yield server


def _config(backend: str, model_url: str, port: int, home: Path) -> dict[str, Any]:
    kind, runtime = BACKENDS[backend]
    return {
        "server": {
            "port": port,
            "data_dir": str(home / "data"),
            "operator_key_env": "OPERATOR_KEY",
        },
        "backend": {"base_url": model_url, "tool_support": "always", "max_retries": 0},
        "keys": [
            {"name": "attacker", "env": "ATTACKER_KEY"},
            {"name": "neighbour", "env": "NEIGHBOUR_KEY"},
        ],
        "sandbox": {
            "backend": kind,
            "docker": {"image": DOCKER_IMAGE, "runtime": runtime},
            "pool": {"min_ready": _READY_SANDBOXES},
        },
        "limits": {
            **dict.fromkeys(("max_turns", "max_commands", "max_total_tokens"), _UNLIMITED),
            "tell_remaining": False,
        },
    }


def _merged(tree: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with the values of `more`, section by section."""
    sections = {
        name: {**tree.get(name, {}), **value} if isinstance(value, Mapping) else value
        for name, value in more.items()
    }
    return {**tree, **sections}


def _code_with_agent(home: Path, agent: bytes) -> Path:
    """Copy the package that contains the agent's program, with another program."""
    package = home / "code" / "sandbox_runtime"
    shutil.copytree(Path(sandbox_runtime.__file__).parent, package)
    (package / "guest" / "bin" / f"agent-{platform.machine()}").write_bytes(agent)
    return package.parent
