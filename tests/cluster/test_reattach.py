"""Sandboxes on a real cluster survive the loss of the connection to their Pods, and end when the
lease is over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from kubernetes_asyncio import client

from policies.isolation import Isolation
from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_pod import PodSpec
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import ExecResult
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import API_PORT
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.cluster import AGENT_IMAGE, MANIFESTS, NAMESPACE, TEST_IMAGE
from tests.sandbox_runtime.transfer import OutputRecorder, output, read, write

pytestmark = pytest.mark.cluster

SMALL = Isolation(memory_mib=128, cpus=0.5)
TIMEOUT_S = 120.0
COUNT = "echo ran >> /testbed/count"
SLOW = f"{COUNT}; echo begun; for n in $(seq 15); do echo $n; sleep 1; done; exit 7"
SLOW_OUTPUT = "begun\n" + "".join(f"{number}\n" for number in range(1, 16))
"""The command runs longer than each outage but the longest."""


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[KubernetesBackend]:
    """A backend on the cluster, whose nodes have the agent image."""
    if AGENT_IMAGE:
        cluster.load_image(AGENT_IMAGE)
    cluster.apply(str(MANIFESTS / "sandboxes.yaml"))
    made = KubernetesBackend(
        PodSpec(TEST_IMAGE, AGENT_IMAGE),
        namespace=NAMESPACE,
        kubeconfig=cluster.kubeconfig,
        allow_unenforced_network_policy=True,
    )
    yield made
    await made.aclose()
    # The API server closes the connection of an attach call that was given up a little later.
    with anyio.fail_after(TIMEOUT_S):
        await until(lambda: not has_connections(API_PORT))


@pytest.fixture
async def sandbox(backend: KubernetesBackend) -> AsyncIterator[GuestSandbox]:
    started = await start_sandbox(backend, SMALL)
    yield started
    await started.close()


def has_connections(port: int) -> bool:
    """Return True if this process has a connection to a port."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the directory itself
            own.add(str(descriptor.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{row[9]}]" in own and row[2].endswith(f":{port:04X}") for row in rows)


async def in_thread(change: str, cluster: Cluster, what: str) -> None:
    """Call a method of the cluster that blocks."""
    await asyncio.to_thread(getattr(cluster, change), what)


class SlowCommand:
    """SLOW, which has printed something when `begun` returns."""

    def __init__(self, sandbox: GuestSandbox) -> None:
        self._recorder = OutputRecorder()
        self.task: asyncio.Task[ExecResult] = asyncio.create_task(
            sandbox.exec(SLOW, timeout_s=TIMEOUT_S, on_output=self._recorder)
        )

    async def begun(self) -> None:
        await self._recorder.something.wait()


async def place_of(core: client.CoreV1Api, sandbox: GuestSandbox) -> tuple[str, str]:
    """Return the uid of the sandbox's Pod, and the name of its node."""
    pod = await core.read_namespaced_pod(sandbox.id, NAMESPACE)
    return str(pod.metadata.uid), str(pod.spec.node_name)


def programs_of(uid: str) -> list[str]:
    """Return the programs that run in a Pod on this machine, less Kubernetes' own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if uid in (process / "cgroup").read_text(encoding="utf-8"):
                found.append((process / "exe").readlink().name)
    return [name for name in found if name != "pause"]


async def require_whole_result(sandbox: GuestSandbox, command: SlowCommand) -> None:
    """Check that the command's result is complete and that it ran once."""
    result = await command.task
    assert (result.stdout, result.stderr, result.exit_code) == (SLOW_OUTPUT, "", 7)
    assert await output(sandbox, "cat /testbed/count") == "ran\n"


async def test_command_survives_a_restart_of_the_kubernetes_api_server(
    cluster: Cluster, sandbox: GuestSandbox
) -> None:
    with anyio.fail_after(TIMEOUT_S):
        command = SlowCommand(sandbox)
        await command.begun()
        await in_thread("kill", cluster, "api-server")
        await in_thread("start", cluster, "api-server")
        await require_whole_result(sandbox, command)
        content = bytes(range(256)) * 4096
        await write(sandbox, "/testbed/file", content)
        assert await read(sandbox, "/testbed/file") == content


async def test_download_survives_a_restart_of_the_kubernetes_api_server(
    cluster: Cluster, sandbox: GuestSandbox
) -> None:
    content = bytes(range(256)) * (20 << 12)
    is_under_way = asyncio.Event()
    received = bytearray()

    async def sink(piece: bytes) -> None:
        received.extend(piece)
        is_under_way.set()

    with anyio.fail_after(TIMEOUT_S):
        await write(sandbox, "/testbed/file", content)
        reading = asyncio.create_task(
            sandbox.get("/testbed/file", sink, max_bytes=len(content), timeout_s=TIMEOUT_S)
        )
        await is_under_way.wait()
        await in_thread("kill", cluster, "api-server")
        assert not reading.done()
        await in_thread("start", cluster, "api-server")
        await reading
        assert received == content


async def test_command_survives_a_short_isolation_of_its_node(
    cluster: Cluster, core: client.CoreV1Api, sandbox: GuestSandbox
) -> None:
    with anyio.fail_after(TIMEOUT_S):
        _, node = await place_of(core, sandbox)
        command = SlowCommand(sandbox)
        await command.begun()
        await in_thread("cut_off", cluster, node)
        # The API server notices about 10 s later.
        await asyncio.to_thread(cluster.wait_for_node, node, ready=False)
        await in_thread("heal", cluster, node)
        await require_whole_result(sandbox, command)


async def test_sandbox_is_lost_when_its_node_is_isolated_longer_than_the_lease(
    cluster: Cluster, core: client.CoreV1Api, sandbox: GuestSandbox
) -> None:
    with anyio.fail_after(TIMEOUT_S):
        uid, node = await place_of(core, sandbox)
        command = SlowCommand(sandbox)
        await command.begun()
        assert "agent" in programs_of(uid)
        await in_thread("cut_off", cluster, node)
        with pytest.raises(SandboxLostError, match="no connection to its Pod for 35 s"):
            await command.task
        assert programs_of(uid) == []  # on a node that is still cut off
        await in_thread("heal", cluster, node)
        await asyncio.to_thread(cluster.wait_for_node, node)
