"""A cluster runs Pods, loses parts and gets them back, and leaves nothing when it goes down."""

import os
from pathlib import Path

import pytest
from kubernetes_asyncio import client
from kubernetes_asyncio.stream import WsApiClient

from tests.cluster.cgroups import existing_cgroups
from tests.cluster.cluster import STATE, Cluster, NodeStatus
from tests.cluster.control_plane import COMPONENTS
from tests.cluster.images import PAUSE_IMAGE
from tests.cluster.network import PREFIX
from tests.cluster.pods import execute, is_running, pod, wait_for_pod
from tests.cluster.processes import ClusterError
from tests.cluster.running import TEST_IMAGE, cluster_or_skip
from tests.processes import all_end, running

pytestmark = pytest.mark.cluster

SETTINGS_OF_THE_MACHINE = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)


def test_cluster_that_is_taken_down_leaves_nothing_on_the_machine() -> None:
    settings, files = settings_of_the_machine(), files_of_kubernetes()
    cluster = cluster_or_skip(f"down{os.getpid() % 100_000}")
    try:
        cluster.up(1)
        cluster.kubectl("run", "pause", f"--image={PAUSE_IMAGE}")
        cluster.kubectl("wait", "pod/pause", "--for=condition=Ready", "--timeout=60s")
        pids = {
            int(pid)
            for cgroup in existing_cgroups(f"{PREFIX}{cluster.name}")
            for path in cgroup.rglob("cgroup.procs")
            for pid in path.read_text(encoding="ascii").split()
        }
        assert pids
        pidfds = [os.pidfd_open(pid) for pid in pids]
        # A cluster of which a part is lost goes down as well.
        cluster.kill("api-server")
        cluster.cut_off("node1")
    finally:
        cluster.down()
    assert all_end(pidfds)
    assert cluster.remains() == []
    assert not running(str(STATE / cluster.name))
    assert str(STATE / cluster.name) not in Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert settings_of_the_machine() == settings
    assert files_of_kubernetes() == files
    cluster.down()


def settings_of_the_machine() -> dict[str, str]:
    return {name: Path("/proc/sys", name).read_text() for name in SETTINGS_OF_THE_MACHINE}


def files_of_kubernetes() -> set[Path]:
    """Return what the kubelet, containerd and the CNI plugins write by default on a machine."""
    folders = ("/etc", "/opt", "/run", "/usr/libexec", "/var/lib", "/var/log")
    names = ("*kube*", "cni", "containerd", "containers", "pods")
    return {path for folder in folders for name in names for path in Path(folder).glob(name)}


async def test_cluster_has_three_ready_nodes_and_all_components_run(
    cluster: Cluster, core: client.CoreV1Api
) -> None:
    status = cluster.status()
    assert status.running == COMPONENTS
    assert status.nodes == tuple(
        NodeStatus(name, True, True, True) for name in ("node1", "node2", "node3")
    )
    listed = await core.list_node()
    assert {each.status.node_info.kubelet_version for each in listed.items} == {"v1.20.2"}


async def test_starting_a_running_test_cluster_again_keeps_its_kubeconfig_and_node_count(
    cluster: Cluster,
) -> None:
    before = cluster.kubeconfig.read_bytes()
    cluster.up(3, [TEST_IMAGE])
    assert cluster.kubeconfig.read_bytes() == before
    with pytest.raises(ClusterError, match="has 3 nodes, not 2"):
        cluster.up(2)


async def test_pod_of_the_test_image_runs_and_executes_a_command(core: client.CoreV1Api) -> None:
    await core.create_namespaced_pod("default", pod("runs", TEST_IMAGE, "sleep", "1000"))
    await wait_for_pod(core, "runs", is_running)
    assert await execute(core, "runs", "sh", "-c", "echo from; hostname; exit 7") == (
        "from\nruns\n",
        7,
    )


async def test_attached_client_talks_to_the_main_process(core: client.CoreV1Api) -> None:
    await core.create_namespaced_pod("default", pod("attached", TEST_IMAGE, "cat"))
    await wait_for_pod(core, "attached", is_running)
    async with WsApiClient(core.api_client.configuration) as api:
        opened = await client.CoreV1Api(api).connect_get_namespaced_pod_attach(
            "attached",
            "default",
            stdin=True,
            stdout=True,
            stderr=False,
            tty=False,
            _preload_content=False,
        )
        async with opened as websocket:
            await websocket.send_bytes(b"\x00said\n")
            received = b""
            while not received.endswith(b"\n"):
                message = await websocket.receive_bytes(timeout=10)
                assert message[:1] == b"\x01"
                received += message[1:]
    assert received == b"said\n"


async def test_second_pod_with_the_same_name_is_refused(core: client.CoreV1Api) -> None:
    await core.create_namespaced_pod("default", pod("once", PAUSE_IMAGE))
    with pytest.raises(client.ApiException) as refused:
        await core.create_namespaced_pod("default", pod("once", PAUSE_IMAGE))
    assert (refused.value.status, refused.value.reason) == (409, "Conflict")


async def test_pod_survives_the_isolation_of_its_node(
    cluster: Cluster, core: client.CoreV1Api
) -> None:
    running_pod = pod("survives", TEST_IMAGE, "sleep", "1000", node="node2")
    await core.create_namespaced_pod("default", running_pod)
    await wait_for_pod(core, "survives", is_running)
    await execute(core, "survives", "touch", "/tmp/before")
    cluster.cut_off("node2")
    cluster.wait_for_node("node2", ready=False)
    assert cluster.status().nodes[1] == NodeStatus("node2", True, False, False)
    cluster.heal("node2")
    cluster.wait_for_node("node2")
    assert await execute(core, "survives", "ls", "/tmp/before") == ("/tmp/before\n", 0)
    observed = await core.read_namespaced_pod("survives", "default")
    assert observed.status.container_statuses[0].restart_count == 0


async def test_pod_on_a_node_without_power_has_ended_when_the_node_is_back(
    cluster: Cluster, core: client.CoreV1Api
) -> None:
    await core.create_namespaced_pod("default", pod("ends", PAUSE_IMAGE, node="node3"))
    await wait_for_pod(core, "ends", is_running)
    cluster.power_off("node3")
    cluster.wait_for_node("node3", ready=False)
    assert not cluster.status().nodes[2].powered
    cluster.power_on("node3")
    cluster.wait_for_node("node3")
    await wait_for_pod(core, "ends", lambda observed: observed.status.phase == "Failed")


async def test_pods_survive_the_death_of_the_api_server_and_etcd(
    cluster: Cluster, core: client.CoreV1Api
) -> None:
    await core.create_namespaced_pod("default", pod("stays", TEST_IMAGE, "sleep", "1000"))
    await wait_for_pod(core, "stays", is_running)
    await execute(core, "stays", "touch", "/tmp/before")
    for component in ("api-server", "etcd"):
        cluster.kill(component)
        assert component not in cluster.status().running
    cluster.start("etcd")
    cluster.start("api-server")
    assert await execute(core, "stays", "ls", "/tmp/before") == ("/tmp/before\n", 0)
