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
from bench.servers import run_process
from bench.table import Row
from bench.venvs import PeerMissingError, peer_python

ORDER_TIMEOUT_S = 180
PEER_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""The environment of the peers' programs. Without this variable, the reference downloads prices,
and waits if there is no network."""

Order = Literal["start", "exec", "put", "get", "stop"]


@dataclass(frozen=True, slots=True)
class PeerPackage:
    """The requirements and the command of a peer's program."""

    name: str
    """The name in rows of tables."""
    venv: str
    requirements: tuple[str, ...]
    program: str
    arguments: tuple[str, ...] = ()


REFERENCE_PACKAGES = ("llm-in-sandbox==0.2.0", "mcp>=2.2,<3")
"""The requirements of the reference. Its dependency litellm fails on requests with tools if mcp is
missing."""
LLM_SANDBOX = ("llm-sandbox[docker]==0.3.46",)
REFERENCE, SWE_REX = "reference", "SWE-ReX"
LLM_DOCKER, LLM_POOL, LLM_BUBBLEWRAP = (
    *("llm-sandbox, docker", "llm-sandbox, docker pool", "llm-sandbox, bubblewrap"),
)
PACKAGES = (
    PeerPackage(REFERENCE, "reference", REFERENCE_PACKAGES, "reference_runtime"),
    # Its client needs aiohttp, which is not among its dependencies.
    PeerPackage(SWE_REX, "swe-rex", ("swe-rex==1.4.0", "aiohttp"), "swe_rex"),
    PeerPackage(LLM_DOCKER, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("docker",)),
    PeerPackage(LLM_POOL, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("pool",)),
    PeerPackage(LLM_BUBBLEWRAP, "llm-sandbox", LLM_SANDBOX, "llm_sandbox", ("bubblewrap",)),
)


class PeerRuntime:
    """The program that runs a peer's sandbox, or the reason why it is not available."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left_out_reason = ""
        """The reason why the peer is left out, or ""."""
        self._child: asyncio.subprocess.Process | None = None
        self._stderr: IO[bytes] | None = None

    @asynccontextmanager
    async def run_program(self, package: PeerPackage, image: str) -> AsyncIterator[None]:
        """Run the program of the peer during the block. If it cannot be installed, set
        `left_out_reason`."""
        try:
            python = await asyncio.to_thread(peer_python, package.venv, *package.requirements)
        except PeerMissingError as error:
            self.left_out_reason = str(error)
            yield
            return
        command = [str(python), "-m", f"bench.peers.{package.program}", image, *package.arguments]
        pipe = asyncio.subprocess.PIPE
        with tempfile.TemporaryFile() as self._stderr:
            async with run_process(
                command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=PEER_ENV
            ) as self._child:
                try:
                    yield
                finally:
                    await self._finish()

    async def _finish(self) -> None:
        """Let the program remove its sandbox, and wait for its end."""
        assert self._child
        assert self._child.stdin
        self._child.stdin.close()
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            await self._child.wait()

    async def order(self, do: Order, **arguments: str) -> float:
        """Run an order and return its duration in ms. Raises PeerMissingError if it fails."""
        assert self._child
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            line = await self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_stderr_line()}
        if "error" in answer:
            raise PeerMissingError(f"{answer['error']}"[:200])
        return float(answer["ms"])

    def _last_stderr_line(self) -> str:
        assert self._stderr
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended"


Work = Callable[[PeerRuntime], Awaitable[Mapping[str, float]]]


@asynccontextmanager
async def runtimes(
    plan: Plan, *, excluded_names: Collection[str] = ()
) -> AsyncIterator[list[PeerRuntime]]:
    """Run the programs of all peers except `excluded_names`, or of none if `plan.allows_peers` is
    False. Their sandboxes are created by `start_all`, or by the order "start".
    """
    async with AsyncExitStack() as opened:
        found = []
        for package in PACKAGES:
            if plan.allows_peers and package.name not in excluded_names:
                runtime = PeerRuntime(package.name)
                await opened.enter_async_context(runtime.run_program(package, plan.image))
                found.append(runtime)
        yield found


async def start_all(peers: Sequence[PeerRuntime]) -> None:
    """Create the sandbox of each peer."""

    async def work(runtime: PeerRuntime) -> Mapping[str, float]:
        await runtime.order("start")
        return {}

    for runtime in peers:
        await _try_work(runtime, work)


def peer_measurements(peers: Sequence[PeerRuntime], work: Work) -> dict[str, Measurement]:
    """Return measurements that run `work` on each peer. A peer is left out after a failure."""
    return {runtime.name: partial(_try_work, runtime, work) for runtime in peers}


async def _try_work(runtime: PeerRuntime, work: Work) -> Mapping[str, float]:
    if runtime.left_out_reason:
        return {}
    try:
        return await work(runtime)
    except PeerMissingError as error:
        runtime.left_out_reason = str(error)
        return {}


def left_out_peer_rows(peers: Sequence[PeerRuntime]) -> list[Row]:
    """Return a row with the reason for each peer that is left out."""
    return [
        Row(runtime.name, note=runtime.left_out_reason)
        for runtime in peers
        if runtime.left_out_reason
    ]
