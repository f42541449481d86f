"""What a command costs: `true` in a sandbox that is already there."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from bench.places import PlainDocker, places
from bench.plan import Plan, Way, interleave, milliseconds
from bench.table import Part, Row
from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.lending import start_sandbox
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 60
TARGET_MS = 8
BY_SDK, BY_CLI, HOST = "docker exec (SDK)", "docker exec (CLI)", "bash -c true on the host"


async def measure(plan: Plan) -> list[Part]:
    """Every backend beside docker exec."""
    async with places(plan.image) as found, AsyncExitStack() as opened:
        ways: dict[str, Way] = {HOST: _on_host}
        for name, backend in found.backends.items():
            ways |= await opened.enter_async_context(_ours(name, backend))
        if "docker" in found.backends:
            ways |= await opened.enter_async_context(_docker_exec(plan.image))
        measured = await interleave(plan.rounds or ROUNDS, ways)
        rows = [
            Row(name, measured[name], target=TARGET_MS, peers=(BY_SDK, BY_CLI, HOST))
            for name in found.backends
        ]
        peers = [Row(name, measured[name]) for name in (BY_SDK, BY_CLI, HOST) if name in measured]
        return [Part("commands: `true`", [*rows, *found.missing, *peers])]


@asynccontextmanager
async def _ours(name: str, backend: Backend) -> AsyncIterator[Mapping[str, Way]]:
    sandbox = await start_sandbox(backend, Isolation())
    try:
        yield {name: lambda: _timed(name, sandbox)}
    finally:
        await sandbox.close()


async def _timed(name: str, sandbox: Sandbox) -> Mapping[str, float]:
    return {name: await milliseconds(sandbox.exec("true", timeout_s=10))}


@asynccontextmanager
async def _docker_exec(image: str) -> AsyncIterator[Mapping[str, Way]]:
    plain = PlainDocker(image)
    container = await plain.run()

    async def by_sdk() -> Mapping[str, float]:
        return {BY_SDK: await milliseconds(plain.exec_by_sdk(container))}

    async def by_command_line() -> Mapping[str, float]:
        return {BY_CLI: await milliseconds(plain.exec_by_command_line(container))}

    try:
        yield {BY_SDK: by_sdk, BY_CLI: by_command_line}
    finally:
        await plain.remove(container)
        plain.close()


async def _on_host() -> Mapping[str, float]:
    """The floor: no isolation, no channel."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("bash", "--norc", "-c", "true")
        await process.wait()

    return {HOST: await milliseconds(run())}
