"""Compares sandboxes in a Kubernetes cluster with those of the local Docker engine: the duration of
a command, of the start of a sandbox and of its end."""

import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from bench.plan import Measurement, Plan, interleave, measure_ms, repeat_measurements
from bench.table import Row, TablePart, sample_key
from policies.isolation import Isolation
from proxy.config import KubernetesConfig
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 10
COMMANDS_PER_ROUND = 20
COMMAND = "pods: `true` in a running sandbox"
START = "pods: start, to the end of the first `true`"
END = "pods: end, off the request's path"
LOCAL, CLUSTER = "docker, on this machine", "kubernetes"
MAX_RATIO = 2.0
"""A command in a Pod may take this many times as long as one on the local engine."""
SMALL = Isolation(memory_mib=256, cpus=0.5)


async def measure(plan: Plan) -> list[TablePart]:
    """Measure the Docker engine of this machine and the Kubernetes cluster of the plan."""
    if plan.kubeconfig is None:
        return [TablePart(COMMAND, [Row(CLUSTER, note="--kubeconfig names no cluster")])]
    try:
        async with AsyncExitStack() as opened:
            return await _measure(plan, opened, plan.kubeconfig)
    except SandboxStartError as error:
        return [TablePart(COMMAND, [Row(CLUSTER, note=str(error))])]


async def _measure(plan: Plan, opened: AsyncExitStack, kubeconfig: Path) -> list[TablePart]:
    from sandbox_runtime.backends.kubernetes import KubernetesBackend  # noqa: PLC0415 - an extra
    from sandbox_runtime.backends.kubernetes_pod import PodSpec  # noqa: PLC0415 - as above

    directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    backends: dict[str, Backend] = {
        LOCAL: DockerBackend(plan.image, state_dir=Path(directory)),
        CLUSTER: KubernetesBackend(
            PodSpec(plan.image, KubernetesConfig().agent_image),
            namespace=KubernetesConfig().namespace,
            kubeconfig=kubeconfig,
            allow_unenforced_network_policy=True,  # only the network check would differ
        ),
    }
    commands: dict[str, Measurement] = {}
    starts: dict[str, Measurement] = {}
    for name, backend in backends.items():
        opened.push_async_callback(backend.aclose)
        sandbox = await opened.enter_async_context(_running_sandbox(backend))
        commands[name] = partial(_measure_command, name, sandbox)
        starts[name] = partial(_measure_start, name, backend)
    rounds = plan.rounds or ROUNDS
    measured = await interleave(rounds, repeat_measurements(COMMANDS_PER_ROUND, commands) | starts)

    def row(name: str, quantity: str, target: float | None = None) -> Row:
        peers = (LOCAL,) if name == CLUSTER else ()
        return Row(name, measured[sample_key(name, quantity)], target=target, peers=peers)

    local = row(LOCAL, COMMAND)
    return [
        TablePart(COMMAND, [row(CLUSTER, COMMAND, MAX_RATIO * local.median), local]),
        TablePart(START, [row(CLUSTER, START), row(LOCAL, START)]),
        TablePart(END, [row(CLUSTER, END), row(LOCAL, END)]),
    ]


@asynccontextmanager
async def _running_sandbox(backend: Backend) -> AsyncIterator[Sandbox]:
    sandbox = await start_sandbox(backend, SMALL)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _measure_command(name: str, sandbox: Sandbox) -> Mapping[str, float]:
    return {sample_key(name, COMMAND): await measure_ms(sandbox.exec("true", timeout_s=10))}


async def _measure_start(name: str, backend: Backend) -> Mapping[str, float]:
    started = time.perf_counter()
    sandbox = await start_sandbox(backend, SMALL)
    await sandbox.exec("true", timeout_s=10)
    ready_ms = (time.perf_counter() - started) * 1000
    end_ms = await measure_ms(sandbox.close())
    return {sample_key(name, START): ready_ms, sample_key(name, END): end_ms}
