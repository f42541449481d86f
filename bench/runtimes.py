"""Peers' sandboxes, each driven by its own program in its own virtualenv."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Literal

from bench.plan import Measurement, Plan
from bench.servers import process
from bench.table import Row
from bench.venvs import PeerMissingError, peer_python

ORDER_TIMEOUT_S = 180
ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Without this variable, the reference downloads prices, and waits if there is no network."""

Order = Literal["start", "exec", "put", "get", "stop"]


@dataclass(frozen=True, slots=True)
class Package:
    """The requirements and the command of a peer's program."""

    name: str
    """The name in rows of tables."""
    venv: str
    requirements: tuple[str, ...]
    program: str
    arguments: tuple[str, ...] = ()


REFERENCE_PACKAGES = ("llm-in-sandbox==0.2.0", "mcp>=2.2,<3")
"""litellm, which the reference needs, fails on requests with tools if mcp is missing."""
LLM_SANDBOX = ("llm-sandbox[docker]==0.3.46",)
REFERENCE, SWE_REX = "reference", "SWE-ReX"
LLM_DOCKER, LLM_POOL, LLM_BUBBLEWRAP = (
    *("llm-sandbox, docker", "llm-sandbox, docker pool", "llm-sandbox, bubblewrap"),
)
PACKAGES = (
    Package(REFERENCE, "reference", REFERENCE_PACKAGES, "reference_runtime"),
    # Its client needs aiohttp, which is not among its dependencies.
    Package(SWE_REX, "swe-rex", ("swe-rex==1.4.0", "aiohttp"), "swe_rex"),
    Package(LLM_DOCKER, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("docker",)),
    Package(LLM_POOL, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("pool",)),
    Package(LLM_BUBBLEWRAP, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("bubblewrap",)),
)


class Runtime:
    """The program that runs a peer's sandbox, or the reason why it is not available."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fault = ""
        """The reason why the peer is left out, or ""."""
        self._child: asyncio.subprocess.Process | None = None
        self._stderr: IO[bytes] | None = None

    @asynccontextmanager
    async def driven(self, package: Package, image: str) -> AsyncIterator[None]:
        """Run the program of the peer during the block. If it cannot be installed, set `fault`."""
        try:
            python = await asyncio.to_thread(peer_python, package.venv, *package.requirements)
        except PeerMissingError as error:
            self.fault = str(error)
            yield
            return
        command = [str(python), "-m", f"bench.peers.{package.program}", image, *package.arguments]
        pipe = asyncio.subprocess.PIPE
        with tempfile.TemporaryFile() as self._stderr:
            async with process(
                command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=ENV
            ) as self._child:
                try:
                    yield
                finally:
                    await self._finish()

    async def _finish(self) -> None:
        """Let the program remove its sandbox."""
        assert self._child
        assert self._child.stdin
        self._child.stdin.close()
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            await self._child.wait()

    async def order(self, do: Order, **arguments: str) -> float:
        """Run an order and return its duration in ms. Raise PeerMissingError."""
        assert self._child
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            line = await self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_line()}
        if "error" in answer:
            raise PeerMissingError(f"{answer['error']}"[:200])
        return float(answer["ms"])

    def _last_line(self) -> str:
        assert self._stderr
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended"


Work = Callable[[Runtime], Awaitable[Mapping[str, float]]]


@asynccontextmanager
async def runtimes(plan: Plan, *, besides: Collection[str] = ()) -> AsyncIterator[list[Runtime]]:
    """Run the programs of all peers except `besides`, or of none if `plan.peers` is False. Their
    sandboxes are created by `start`, or by the order "start".
    """
    async with AsyncExitStack() as opened:
        found = []
        for package in PACKAGES:
            if plan.peers and package.name not in besides:
                runtime = Runtime(package.name)
                await opened.enter_async_context(runtime.driven(package, plan.image))
                found.append(runtime)
        yield found


async def start(found: Sequence[Runtime]) -> None:
    """Create the sandbox of each peer."""

    async def work(runtime: Runtime) -> Mapping[str, float]:
        await runtime.order("start")
        return {}

    for runtime in found:
        await _attempt(runtime, work)


def peer_measurements(found: Sequence[Runtime], work: Work) -> dict[str, Measurement]:
    """Return measurements that run `work` on each peer. A peer is left out after a failure."""
    return {runtime.name: partial(_attempt, runtime, work) for runtime in found}


async def _attempt(runtime: Runtime, work: Work) -> Mapping[str, float]:
    if runtime.fault:
        return {}
    try:
        return await work(runtime)
    except PeerMissingError as error:
        runtime.fault = str(error)
        return {}


def left_out(found: Sequence[Runtime]) -> list[Row]:
    """Return a row with the reason for each peer that is left out."""
    return [Row(runtime.name, note=runtime.fault) for runtime in found if runtime.fault]
