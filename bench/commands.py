"""Latency and throughput of commands in running sandboxes."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from docker.models.containers import Container

from bench.backends import BenchBackend, Kind, working_backends
from bench.plain_docker import PlainDocker, plain_container
from bench.plan import Measurement, Plan, interleave, milliseconds, repeated
from bench.runtimes import (
    LLM_BUBBLEWRAP,
    LLM_DOCKER,
    LLM_POOL,
    REFERENCE,
    SWE_REX,
    Runtime,
    left_out,
    peer_measurements,
    runtimes,
    start,
)
from bench.sandboxes import fresh_sandbox
from bench.table import TablePart, compared, figure
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 12
OURS_PER_ROUND = 5
BURSTS = 5
AT_ONCE = 16
EACH = 20
"""Number of commands that one burst runs in each sandbox."""
EACH_PLAIN = 3
TRUE, ECHO = "commands: `true`", "commands: `echo`"
THROUGHPUT = f"commands: `true` in {AT_ONCE} sandboxes at once"
TARGET_MS = 4
PER_S = 130
BY_SDK, BY_CLI, HOST = "docker exec (SDK)", "docker exec (CLI)", "bash -c on the host"
PEERS: Mapping[Kind, tuple[str, ...]] = {
    "docker": (HOST, BY_SDK, BY_CLI, REFERENCE, SWE_REX, LLM_DOCKER),
    "bubblewrap": (HOST, BY_SDK, BY_CLI, REFERENCE, SWE_REX, LLM_BUBBLEWRAP),
}


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, docker exec and the peers."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        ours: dict[str, Measurement] = {HOST: _on_host}
        for backend in found.working:
            sandbox = await opened.enter_async_context(fresh_sandbox(backend))
            ours[backend.name] = partial(_ours, backend, sandbox)
        peers = await opened.enter_async_context(runtimes(plan, besides=(LLM_POOL,)))
        await start(peers)
        measurements = repeated(OURS_PER_ROUND, ours) | peer_measurements(peers, _peer)
        if "docker" in found.kinds:
            plain = await opened.enter_async_context(plain_container(plan.image))
            measurements |= {
                BY_SDK: partial(_by_sdk, *plain),
                BY_CLI: partial(_by_command_line, *plain),
            }
        measured = await interleave(plan.rounds or ROUNDS, measurements)
        missing = [*found.missing, *left_out(peers)]
        targets = {backend.name: TARGET_MS for backend in found.working}
        rivals = {backend.name: PEERS[backend.kind] for backend in found.working}
        return [
            compared(TRUE, measured, targets, rivals, missing=missing),
            compared(ECHO, measured, targets, rivals),
            await _throughput(plan, found.working),
        ]


async def _ours(backend: BenchBackend, sandbox: Sandbox) -> Mapping[str, float]:
    return {
        figure(backend.name, TRUE): await milliseconds(sandbox.exec("true", timeout_s=10)),
        figure(backend.name, ECHO): await milliseconds(sandbox.exec("echo hello", timeout_s=10)),
    }


async def _peer(runtime: Runtime) -> Mapping[str, float]:
    return {
        figure(runtime.name, TRUE): await runtime.order("exec", command="true"),
        figure(runtime.name, ECHO): await runtime.order("exec", command="echo hello"),
    }


async def _by_sdk(plain: PlainDocker, container: Container) -> Mapping[str, float]:
    return {figure(BY_SDK, TRUE): await milliseconds(plain.exec_by_sdk(container))}


async def _by_command_line(plain: PlainDocker, container: Container) -> Mapping[str, float]:
    return {figure(BY_CLI, TRUE): await milliseconds(plain.exec_by_command_line(container))}


async def _on_host() -> Mapping[str, float]:
    """Measure a command on the host, without isolation: the lower bound."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("bash", "--norc", "-c", "true")
        await process.wait()

    return {figure(HOST, TRUE): await milliseconds(run())}


async def _throughput(plan: Plan, ours: Sequence[BenchBackend]) -> TablePart:
    async with AsyncExitStack() as opened:
        measurements: dict[str, Measurement] = {}
        for backend in ours:
            sandboxes = [
                await opened.enter_async_context(fresh_sandbox(backend)) for _ in range(AT_ONCE)
            ]
            measurements[backend.name] = partial(_burst, backend, sandboxes)
        if any(backend.kind == "docker" for backend in ours):
            plain = [
                await opened.enter_async_context(plain_container(plan.image))
                for _ in range(AT_ONCE)
            ]
            measurements[BY_SDK] = partial(_plain_burst, plain)
        measured = await interleave(min(plan.rounds or BURSTS, BURSTS), measurements)
    names = [backend.name for backend in ours]
    targets, peers = dict.fromkeys(names, PER_S), dict.fromkeys(names, (BY_SDK,))
    return compared(THROUGHPUT, measured, targets, peers, unit="commands/s")


async def _burst(backend: BenchBackend, sandboxes: Sequence[Sandbox]) -> Mapping[str, float]:
    async def work(sandbox: Sandbox) -> None:
        for _ in range(EACH):
            await sandbox.exec("true", timeout_s=60)

    started = time.perf_counter()
    await asyncio.gather(*(work(sandbox) for sandbox in sandboxes))
    took_s = time.perf_counter() - started
    return {figure(backend.name, THROUGHPUT): EACH * len(sandboxes) / took_s}


async def _plain_burst(plain: Sequence[tuple[PlainDocker, Container]]) -> Mapping[str, float]:
    async def work(docker: PlainDocker, container: Container) -> None:
        for _ in range(EACH_PLAIN):
            await docker.exec_by_sdk(container)

    started = time.perf_counter()
    await asyncio.gather(*(work(*each) for each in plain))
    took_s = time.perf_counter() - started
    return {figure(BY_SDK, THROUGHPUT): EACH_PLAIN * len(plain) / took_s}
