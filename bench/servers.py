"""Server processes and their resource usage."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.load import is_answering
from policies.pool import PoolSettings

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 10
DEFAULT_POOL = PoolSettings()
PROCESSOR_CLOCK = 2
"""Linux's number of the clock that counts a process's time in user mode and in the kernel
(CPUCLOCK_SCHED in the kernel's include/linux/posix-timers.h)."""


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A server process that answers requests."""

    pid: int
    port: int
    ready_s: float
    """Seconds from its start to its first answer."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def cpu_s(self) -> float:
        """Processor time of all threads of the process so far, in seconds."""
        return time.clock_gettime(~self.pid << 3 | PROCESSOR_CLOCK)

    def rss_mib(self) -> float:
        """Resident memory of the process, in MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


@asynccontextmanager
async def run_process(
    command: Sequence[str],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int | IO[bytes] = asyncio.subprocess.DEVNULL,
    stderr: int | IO[bytes] = asyncio.subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a child process during the block; `env` extends the environment."""
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


@asynccontextmanager
async def run_server(
    command: Sequence[str],
    port: int,
    *,
    path: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    log_file: Path | None = None,
) -> AsyncIterator[BenchServer]:
    """Run a server, and yield it once it answers at `path`. Its output is appended to `log_file`.
    Raises RuntimeError if the server ends first, or if it does not answer within `timeout_s`."""
    started = time.perf_counter()
    with log_file.open("a+b") if log_file else tempfile.TemporaryFile() as log:
        async with run_process(command, stdout=log, stderr=log, env=env) as child:
            while not await is_answering(port, path):
                took_s = time.perf_counter() - started
                if child.returncode is not None or took_s > timeout_s:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"{' '.join(command)} does not answer: {said}")
                await asyncio.sleep(0.01)
            yield BenchServer(child.pid, port, time.perf_counter() - started)


@asynccontextmanager
async def run_module(
    name: str, *arguments: str, path: str = "/health"
) -> AsyncIterator[BenchServer]:
    """Run `python -m NAME PORT ARGUMENTS...`, a server, with the interpreter of this process."""
    port = free_port()
    command = [sys.executable, "-m", name, str(port), *arguments]
    async with run_server(command, port, path=path) as server:
        yield server


def run_instant_model() -> AbstractAsyncContextManager[BenchServer]:
    """Run the language model that answers without delay."""
    return run_module("bench.instant_model", path="/v1/models")


@asynccontextmanager
async def run_proxy(
    model: BenchServer,
    *,
    sandbox: str,
    image: str,
    idle: int = DEFAULT_POOL.min_ready,
    runtime: str | None = None,
    isolation: Mapping[str, Any] | None = None,
    captures_tokens: bool = False,
) -> AsyncIterator[BenchServer]:
    """Run `python -m proxy serve` with a pool of `idle` idle sandboxes.

    `runtime` is the Docker engine's runtime; `isolation` is the section `isolation` of config.yaml.
    `captures_tokens` allows requests to capture tokens.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        config: dict[str, Any] = {
            "server": {"port": port, "data_dir": directory},
            "backend": {"base_url": model.base_url, "tool_support": "always"},
            "sandbox": {
                "backend": sandbox,
                "docker": {"image": image, "runtime": runtime},
                "pool": {"min_ready": idle},
            },
            "isolation": isolation or {},
            "profiles": {"default": {"agent": {"capture_tokens": captures_tokens}}},
        }
        file = Path(directory, "config.yaml")
        await asyncio.to_thread(file.write_text, json.dumps(config))
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file)]
        async with run_server(command, port, path="/health") as server:
            yield server
