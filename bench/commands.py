"""Latency and throughput of commands in running sandboxes."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from docker.models.containers import Container

from bench.backends import BenchBackend, Kind, working_backends
from bench.plain_docker import PlainDocker, plain_container
from bench.plan import Measurement, Plan, interleave, measure_ms, repeat_measurements
from bench.runtimes import (
    LLM_BUBBLEWRAP,
    LLM_DOCKER,
    LLM_POOL,
    REFERENCE,
    SWE_REX,
    PeerRuntime,
    left_out_peer_rows,
    peer_measurements,
    runtimes,
    start_all,
)
from bench.sandboxes import fresh_sandbox
from bench.table import TablePart, comparison_part, sample_key
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 12
REPEATS_PER_ROUND = 5
BURSTS = 5
SANDBOX_COUNT = 16
COMMANDS_PER_SANDBOX = 20
"""Number of commands that one burst runs in each sandbox."""
COMMANDS_PER_CONTAINER = 3
TRUE, ECHO = "commands: `true`", "commands: `echo`"
THROUGHPUT = f"commands: `true` in {SANDBOX_COUNT} sandboxes at once"
TARGET_MS = 4
TARGET_PER_S = 130
BY_SDK, BY_CLI, HOST = "docker exec (SDK)", "docker exec (CLI)", "bash -c on the host"
PEERS: Mapping[Kind, tuple[str, ...]] = {
    "docker": (HOST, BY_SDK, BY_CLI, REFERENCE, SWE_REX, LLM_DOCKER),
    "bubblewrap": (HOST, BY_SDK, BY_CLI, REFERENCE, SWE_REX, LLM_BUBBLEWRAP),
}


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, docker exec and the peers."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        ours: dict[str, Measurement] = {HOST: _measure_host}
        for backend in found.working:
            sandbox = await opened.enter_async_context(fresh_sandbox(backend))
            ours[backend.name] = partial(_measure_backend, backend, sandbox)
        peers = await opened.enter_async_context(runtimes(plan, excluded_names=(LLM_POOL,)))
        await start_all(peers)
        measurements = repeat_measurements(REPEATS_PER_ROUND, ours) | peer_measurements(
            peers, _measure_peer
        )
        if "docker" in found.kinds:
            plain = await opened.enter_async_context(plain_container(plan.image))
            measurements |= {
                BY_SDK: partial(_measure_sdk, *plain),
                BY_CLI: partial(_measure_command_line, *plain),
            }
        measured = await interleave(plan.rounds or ROUNDS, measurements)
        missing = [*found.missing_rows, *left_out_peer_rows(peers)]
        targets = {backend.name: TARGET_MS for backend in found.working}
        rivals = {backend.name: PEERS[backend.kind] for backend in found.working}
        return [
            comparison_part(TRUE, measured, targets, rivals, missing_rows=missing),
            comparison_part(ECHO, measured, targets, rivals),
            await _throughput_part(plan, found.working),
        ]


async def _measure_backend(backend: BenchBackend, sandbox: Sandbox) -> Mapping[str, float]:
    return {
        sample_key(backend.name, TRUE): await measure_ms(sandbox.exec("true", timeout_s=10)),
        sample_key(backend.name, ECHO): await measure_ms(sandbox.exec("echo hello", timeout_s=10)),
    }


async def _measure_peer(runtime: PeerRuntime) -> Mapping[str, float]:
    return {
        sample_key(runtime.name, TRUE): await runtime.order("exec", command="true"),
        sample_key(runtime.name, ECHO): await runtime.order("exec", command="echo hello"),
    }


async def _measure_sdk(plain_docker: PlainDocker, container: Container) -> Mapping[str, float]:
    return {sample_key(BY_SDK, TRUE): await measure_ms(plain_docker.exec_by_sdk(container))}


async def _measure_command_line(
    plain_docker: PlainDocker, container: Container
) -> Mapping[str, float]:
    return {
        sample_key(BY_CLI, TRUE): await measure_ms(plain_docker.exec_by_command_line(container))
    }


async def _measure_host() -> Mapping[str, float]:
    """Measure a command on the host, without isolation: the lower bound."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("bash", "--norc", "-c", "true")
        await process.wait()

    return {sample_key(HOST, TRUE): await measure_ms(run())}


async def _throughput_part(plan: Plan, backends: Sequence[BenchBackend]) -> TablePart:
    async with AsyncExitStack() as opened:
        measurements: dict[str, Measurement] = {}
        for backend in backends:
            sandboxes = [
                await opened.enter_async_context(fresh_sandbox(backend))
                for _ in range(SANDBOX_COUNT)
            ]
            measurements[backend.name] = partial(_measure_burst, backend, sandboxes)
        if any(backend.kind == "docker" for backend in backends):
            plain = [
                await opened.enter_async_context(plain_container(plan.image))
                for _ in range(SANDBOX_COUNT)
            ]
            measurements[BY_SDK] = partial(_measure_plain_burst, plain)
        measured = await interleave(min(plan.rounds or BURSTS, BURSTS), measurements)
    names = [backend.name for backend in backends]
    targets, peers = dict.fromkeys(names, TARGET_PER_S), dict.fromkeys(names, (BY_SDK,))
    return comparison_part(THROUGHPUT, measured, targets, peers, unit="commands/s")


async def _measure_burst(
    backend: BenchBackend, sandboxes: Sequence[Sandbox]
) -> Mapping[str, float]:
    async def work(sandbox: Sandbox) -> None:
        for _ in range(COMMANDS_PER_SANDBOX):
            await sandbox.exec("true", timeout_s=60)

    started = time.perf_counter()
    await asyncio.gather(*(work(sandbox) for sandbox in sandboxes))
    took_s = time.perf_counter() - started
    return {sample_key(backend.name, THROUGHPUT): COMMANDS_PER_SANDBOX * len(sandboxes) / took_s}


async def _measure_plain_burst(
    containers: Sequence[tuple[PlainDocker, Container]],
) -> Mapping[str, float]:
    async def work(docker: PlainDocker, container: Container) -> None:
        for _ in range(COMMANDS_PER_CONTAINER):
            await docker.exec_by_sdk(container)

    started = time.perf_counter()
    await asyncio.gather(*(work(*each) for each in containers))
    took_s = time.perf_counter() - started
    return {sample_key(BY_SDK, THROUGHPUT): COMMANDS_PER_CONTAINER * len(containers) / took_s}
