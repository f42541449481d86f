"""Sandboxes on a real cluster: their start, their end, their owners, and what may go wrong."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml

from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_pod import OWNER_LABEL, PodSpec
from sandbox_runtime.errors import NoCapacityError, SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.pool.pool import Pool
from tests.e2e.leftovers import open_files
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.cluster import (
    AGENT_IMAGE,
    NAMESPACE,
    TEST_IMAGE,
    ClusterAdmin,
    kubeconfig,
    kubernetes_backend,
)
from tests.sandbox_runtime.backends.policy_plugin import enforced_policies
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output

pytestmark = pytest.mark.cluster

SMALL = Isolation(memory_mib=128, cpus=0.1)
LIMITED, ORPHANED = "llm-sandboxes-limited", "llm-sandboxes-orphaned"
"""Namespaces of one test each, which no other test may disturb."""
OWNER_PROGRAM = """
import asyncio
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.sandbox_runtime.backends.cluster import kubernetes_backend
from tests.sandbox_runtime.backends.test_kubernetes import SMALL

async def main():
    backend = kubernetes_backend(namespace="llm-sandboxes-orphaned")
    print((await start_sandbox(backend, SMALL)).id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
async def admin() -> AsyncIterator[ClusterAdmin]:
    async with ClusterAdmin() as made:
        await made.apply("sandboxes.yaml")
        yield made


@pytest.fixture
async def backend(admin: ClusterAdmin) -> AsyncIterator[KubernetesBackend]:
    made = kubernetes_backend()
    yield made
    await made.aclose()


@asynccontextmanager
async def started(
    backend: KubernetesBackend, isolation: Isolation = SMALL
) -> AsyncIterator[GuestSandbox]:
    with anyio.fail_after(120):
        sandbox = await start_sandbox(backend, isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def pods_of(
    admin: ClusterAdmin, backend: KubernetesBackend, namespace: str = NAMESPACE
) -> list[str]:
    """Return the names of a backend's Pods that are not being removed."""
    owner = backend._owner.id
    return [
        pod["metadata"]["name"]
        for pod in await admin.pods(namespace)
        if pod["metadata"]["labels"][OWNER_LABEL] == owner
        and "deletionTimestamp" not in pod["metadata"]
    ]


async def test_closed_sandbox_leaves_no_pod_and_closed_backend_no_lease(
    admin: ClusterAdmin,
) -> None:
    backend = kubernetes_backend()
    async with started(backend) as sandbox:
        assert await pods_of(admin, backend) == [sandbox.id]
        assert await output(sandbox, "echo hello") == "hello\n"
    assert await pods_of(admin, backend) == []
    await backend.aclose()
    leases = await admin.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")
    owners = [lease["spec"]["holderIdentity"] for lease in leases["items"]]
    assert backend._owner.id not in owners


async def test_closed_backend_leaves_no_connection(admin: ClusterAdmin) -> None:
    before = open_files()
    backend = kubernetes_backend()
    await backend._begin_ownership()
    assert open_files() != before
    await backend.aclose()
    assert open_files() == before


async def test_cancelled_starts_leave_no_pod(
    admin: ClusterAdmin, backend: KubernetesBackend
) -> None:
    for delay_s in (0.0, 0.05, 0.3, 1.0):
        with anyio.move_on_after(delay_s):
            await (await start_sandbox(backend, SMALL)).close()
    with anyio.fail_after(60):
        while await pods_of(admin, backend):
            pass
    assert backend._guests == {}


async def test_image_that_holds_the_agent_needs_no_agent_image() -> None:
    if not (image := os.environ.get("SANDBOX_TEST_IMAGE_WITH_AGENT")):
        pytest.skip("SANDBOX_TEST_IMAGE_WITH_AGENT names no image")
    backend = kubernetes_backend(PodSpec(image))
    async with started(backend) as sandbox:
        assert await output(sandbox, "echo hello") == "hello\n"
    await backend.aclose()


async def test_missing_image_is_reported_at_once(admin: ClusterAdmin) -> None:
    backend = kubernetes_backend(PodSpec("localhost/no-such-image:1", AGENT_IMAGE))
    with pytest.raises(SandboxStartError, match="no-such-image:1' cannot be pulled"):
        await start_sandbox(backend, SMALL)
    assert await pods_of(admin, backend) == []
    await backend.aclose()


async def test_image_without_the_agent_is_reported(admin: ClusterAdmin) -> None:
    if AGENT_IMAGE is None:
        pytest.skip("the image of the tests holds the agent")
    without = kubernetes_backend(PodSpec(TEST_IMAGE))
    with pytest.raises(SandboxStartError, match=r"lacks /\.agent/agent"):
        await start_sandbox(without, SMALL)
    await without.aclose()


async def test_start_of_a_sandbox_that_fits_on_no_node_may_be_retried(admin: ClusterAdmin) -> None:
    backend = kubernetes_backend(start_timeout_s=3.0)
    with pytest.raises(NoCapacityError, match="Insufficient cpu") as caught:
        await start_sandbox(backend, replace(SMALL, cpus=100.0))
    assert caught.value.retry_after_s > 0
    assert await pods_of(admin, backend) == []
    await backend.aclose()


async def test_start_refused_by_an_exhausted_quota_may_be_retried(admin: ClusterAdmin) -> None:
    await admin.apply("sandboxes.yaml", LIMITED)
    quota = {"metadata": {"name": "one-pod", "namespace": LIMITED}, "spec": {"hard": {"pods": "1"}}}
    await admin.apply_object({"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    backend = kubernetes_backend(namespace=LIMITED)
    with anyio.fail_after(60):  # until the quota holds, and an earlier run's Pod is gone
        while (await admin.call("GET", f"/api/v1/namespaces/{LIMITED}/resourcequotas/one-pod"))[
            "status"
        ].get("used") != {"pods": "0"}:
            pass
    async with started(backend):
        with pytest.raises(NoCapacityError, match="exceeded quota: one-pod"):
            await start_sandbox(backend, SMALL)
    await backend.aclose()


async def test_unreachable_api_is_reported(tmp_path: Path) -> None:
    tree = yaml.safe_load(kubeconfig().read_text(encoding="utf-8"))
    tree["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(tree), encoding="utf-8")
    backend = kubernetes_backend(kubeconfig=elsewhere)
    with pytest.raises(SandboxStartError, match=r"https://127\.0\.0\.1:1 does not answer"):
        await start_sandbox(backend, SMALL)
    assert [check.ok for check in await backend.check()] == [False]
    assert await backend.sweep() == 0
    await backend.aclose()


async def test_backend_check_reports_a_missing_kubeconfig(tmp_path: Path) -> None:
    backend = KubernetesBackend(
        PodSpec(TEST_IMAGE), namespace=NAMESPACE, kubeconfig=tmp_path / "none.yaml"
    )
    (check,) = await backend.check()
    assert not check.ok
    assert "none.yaml names no cluster that can be used" in check.detail
    await backend.aclose()


async def service_account_backend(
    admin: ClusterAdmin, name: str, directory: Path, **settings: Any
) -> KubernetesBackend:
    """Return a backend that uses a service account of the proxy's namespace."""
    account = {"metadata": {"name": name, "namespace": "llm-sandbox-proxy"}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "llm-sandbox-proxy"}}
    await admin.apply_object(namespace)
    await admin.apply_object({"apiVersion": "v1", "kind": "ServiceAccount", **account})
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], "expirationSeconds": 3600},
    }
    path = f"/api/v1/namespaces/llm-sandbox-proxy/serviceaccounts/{name}/token"
    token = (await admin.call("POST", path, request))["status"]["token"]
    tree = yaml.safe_load(kubeconfig().read_text(encoding="utf-8"))
    tree["users"] = [{"name": tree["users"][0]["name"], "user": {"token": token}}]
    file = directory / name
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return kubernetes_backend(kubeconfig=file, **settings)


async def test_role_in_the_manifests_permits_all_requests_of_the_backend(
    admin: ClusterAdmin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = await service_account_backend(admin, "sandbox-proxy", tmp_path)
    checks = await backend.check()
    assert [check for check in checks if not check.ok] == []
    async with started(backend) as sandbox:
        assert await output(sandbox, "echo hello") == "hello\n"
    await backend.sweep()
    await backend.aclose()
    assert [record.getMessage() for record in caplog.records] == []  # nothing was forbidden


async def test_backend_check_lists_missing_permissions(admin: ClusterAdmin, tmp_path: Path) -> None:
    backend = await service_account_backend(admin, "nobody", tmp_path)
    failed = [check for check in await backend.check() if not check.ok]
    assert [check.name for check in failed] == ["kubernetes permissions"]
    assert "create pods" in failed[0].detail
    assert "get pods/attach" in failed[0].detail
    with pytest.raises(SandboxStartError, match="may not start Pods in namespace"):
        await start_sandbox(backend, SMALL)
    await backend.aclose()


async def test_renewed_credentials_are_read_from_the_kubeconfig(
    admin: ClusterAdmin, tmp_path: Path
) -> None:
    backend = await service_account_backend(admin, "sandbox-proxy", tmp_path)
    file = tmp_path / "sandbox-proxy"
    valid = file.read_text(encoding="utf-8")
    tree = yaml.safe_load(valid)
    tree["users"][0]["user"]["token"] = "expired"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(SandboxStartError, match="Unauthorized"):
        await start_sandbox(backend, SMALL)
    file.write_text(valid, encoding="utf-8")
    async with started(backend) as sandbox:
        assert await output(sandbox, "echo renewed") == "renewed\n"
    await backend.aclose()


async def test_backend_refuses_a_cluster_that_enforces_no_network_policy(
    admin: ClusterAdmin,
) -> None:
    backend = kubernetes_backend(allow_unenforced_network_policy=False)
    (network,) = [check for check in await backend.check() if check.name == "kubernetes network"]
    if network.ok:
        pytest.skip("the network plugin of this cluster enforces network policies")
    assert "no enforced network policy keeps a sandbox from" in network.detail
    with pytest.raises(SandboxStartError, match="allow_unenforced_network_policy"):
        await start_sandbox(backend, SMALL)
    assert await pods_of(admin, backend) == []
    await backend.aclose()


async def test_backend_accepts_a_cluster_whose_network_policy_is_enforced(
    admin: ClusterAdmin,
) -> None:
    async with enforced_policies(admin):
        backend = kubernetes_backend(allow_unenforced_network_policy=False)
        (network,) = [each for each in await backend.check() if each.name == "kubernetes network"]
        assert network.ok
        assert network.detail.startswith("a policy is enforced: sandboxes do not reach ")
        async with started(backend) as sandbox:
            host = urlsplit(backend._api.url)
            connect = f"timeout 2 bash -c '</dev/tcp/{host.hostname}/{host.port}' 2>/dev/null"
            assert await output(sandbox, f"{connect} || echo denied") == "denied\n"
        await backend.aclose()


async def test_running_command_raises_when_its_pod_is_deleted(
    admin: ClusterAdmin, backend: KubernetesBackend
) -> None:
    recorder = OutputRecorder()
    async with started(backend) as sandbox:
        running = asyncio.create_task(
            sandbox.exec("echo begun; sleep 60", timeout_s=PLENTY_S, on_output=recorder)
        )
        await recorder.something.wait()
        await admin.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.id}")
        with pytest.raises(SandboxLostError, match="deleted from outside"):
            await running


async def test_deadline_of_a_pod_ends_its_sandbox(
    admin: ClusterAdmin, backend: KubernetesBackend
) -> None:
    async with started(backend) as sandbox:
        spec = {"activeDeadlineSeconds": 1}
        await admin.patch(f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.id}", {"spec": spec})
        with pytest.raises(SandboxLostError, match="DeadlineExceeded"):
            await sandbox.exec("sleep 60", timeout_s=PLENTY_S)


async def test_limits_of_a_pod_cannot_be_changed(backend: KubernetesBackend) -> None:
    async with started(backend) as sandbox:
        with pytest.raises(SandboxStartError, match="cannot be changed"):
            await sandbox.resize(replace(SMALL, memory_mib=256))
        assert await output(sandbox, "echo still here") == "still here\n"


async def test_sweep_removes_the_pods_of_a_killed_process_when_its_lease_has_expired(
    admin: ClusterAdmin,
) -> None:
    await admin.apply("sandboxes.yaml", ORPHANED)
    backend = kubernetes_backend(namespace=ORPHANED)
    with anyio.fail_after(120):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", OWNER_PROGRAM), stdout=subprocess.PIPE
        )
        assert process.stdout
        pod = (await process.stdout.readline()).decode().strip()
        owner = pod.split("-")[1]
        await backend._begin_ownership()
        assert await backend.sweep() == 0  # its owner lives
        process.send_signal(signal.SIGKILL)
        await process.wait()
        assert await backend.sweep() == 0  # its lease has not expired
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{ORPHANED}/leases/sandbox-owner-{owner}"
        await admin.patch(lease, {"spec": {"renewTime": "2021-01-01T00:00:00.000000Z"}})
        async with started(backend):
            assert await backend.sweep() == 1
            assert len(await pods_of(admin, backend, ORPHANED)) == 1  # the sweeping one's own
        leases = await admin.call("GET", lease.rpartition("/")[0])
        assert owner not in [each["spec"]["holderIdentity"] for each in leases["items"]]
        while pod in [each["metadata"]["name"] for each in await admin.pods(ORPHANED)]:
            pass
    await backend.aclose()


async def test_lease_is_created_again_if_another_proxy_has_removed_it(
    admin: ClusterAdmin, backend: KubernetesBackend
) -> None:
    await backend._begin_ownership()
    owner = backend._owner
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{owner._name}"
    long_ago = "2021-01-01T00:00:00.000000Z"
    await admin.patch(path, {"spec": {"renewTime": long_ago}})
    await owner._renew()
    assert (await admin.call("GET", path))["spec"]["renewTime"] > long_ago
    await admin.call("DELETE", path)
    await owner._renew()
    assert (await admin.call("GET", path))["spec"]["holderIdentity"] == owner.id


async def test_pool_keeps_pods_ready_and_leaves_none_when_it_is_closed(
    admin: ClusterAdmin, backend: KubernetesBackend
) -> None:
    pool = Pool(backend, PoolSettings(min_ready=2), [SMALL])
    pool.start()
    with anyio.fail_after(180):
        seen = set()
        await until(lambda: pool.stats().idle == 2)
        for _ in range(6):
            async with pool.lease(SMALL) as lease:
                sandbox = await lease.sandbox()
                assert await output(sandbox, "cat /tmp/mine 2>/dev/null; echo x > /tmp/mine") == ""
                seen.add(sandbox.id)
        assert len(seen) == 6
        assert pool.stats().failed == 0
        assert pool.stats().hits > 0
        await until(lambda: pool.stats().idle == 2)
        async with pool.lease(replace(SMALL, memory_mib=192)) as lease:
            assert await output(await lease.sandbox(), "echo larger") == "larger\n"
        assert pool.stats().replaced == 0  # the ready Pods, whose limits are fixed, are kept
        await pool.aclose()
    assert await pods_of(admin, backend) == []
