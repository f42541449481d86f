"""The boundaries of a Pod: those that hold, those that are accepted because the network policy or
the nodes must hold them, and those that no cluster holds."""

import os
from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest

from policies.isolation import Isolation, Level
from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_check import accepted_escapes
from sandbox_runtime.backends.kubernetes_pod import PodSpec
from sandbox_runtime.escape.context import Attack, EscapeContext
from sandbox_runtime.escape.run import (
    ATTACKS,
    PROBES,
    accept,
    refusal_reason,
    run_attack,
    run_probes,
)
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.sandbox_runtime.backends.cluster import (
    AGENT_IMAGE,
    TEST_IMAGE,
    ClusterAdmin,
    kubernetes_backend,
)
from tests.sandbox_runtime.conformance.backends import CLUSTER_CPUS

pytestmark = pytest.mark.cluster

PROFILE = os.environ.get("SANDBOX_TEST_SECCOMP_PROFILE") or None
"""The name of the copy of deploy/kubernetes/seccomp.json on the nodes, if they have one."""
OPEN: Mapping[str, str] = {
    "deleted_disk_bomb": "the kubelet measures only files that have a name",
    "hidden_disk_bomb": "the kubelet measures only files that it can see",
    "inode_bomb": "a Pod has no limit for the number of files",
    "terminal_bomb": "the terminals of a container have no limit of their own",
    "strict_terminal_bomb": "the terminals of a container have no limit of their own",
}
"""Attacks that succeed on every cluster with the nodes' own kernel."""
OPEN_SOMETIMES: Mapping[str, str] = {
    "disk_read_bomb": "a Pod has no limit for disk speed, but the disk may be slow",
    "disk_write_bomb": "a Pod has no limit for disk speed, but the disk may be slow",
    "engine_file_bomb": "the kubelet may measure the files that it mounts, such as /etc/hosts",
}
"""Attacks that succeed depending on the nodes."""
OPEN_WITHOUT_PROFILE: Mapping[str, str] = {
    "inotify_bomb": "the runtime's profile permits inotify",
    "aio_bomb": "the runtime's profile permits asynchronous I/O",
}
NEED_A_LIMIT_OF_PROCESSES = {"fork_bomb", "thread_bomb", "shell_fork_bomb"}


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[KubernetesBackend]:
    async with ClusterAdmin() as admin:
        await admin.apply("sandboxes.yaml")
    made = kubernetes_backend(PodSpec(TEST_IMAGE, AGENT_IMAGE, seccomp_profile=PROFILE))
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def context(backend: KubernetesBackend) -> AsyncIterator[EscapeContext]:
    made = EscapeContext(partial(start_sandbox, backend), Isolation(cpus=CLUSTER_CPUS))
    yield made
    await made.aclose()


def test_accepted_and_open_escape_attempts_of_kubernetes_are_names_of_existing_attempts() -> None:
    names = {*(probe.name for probe in PROBES), *(attack.name for attack in ATTACKS)}
    assert set(accepted_escapes(has_own_profile=False)) <= names
    assert set(accepted_escapes(has_own_profile=True)) < set(
        accepted_escapes(has_own_profile=False)
    )
    assert {*OPEN, *OPEN_SOMETIMES, *OPEN_WITHOUT_PROFILE, *NEED_A_LIMIT_OF_PROCESSES} <= names


@pytest.mark.parametrize("level", ["standard", "strict"])
async def test_every_escape_probe_in_a_pod_gets_the_verdict_held_or_accepted(
    backend: KubernetesBackend, level: Level
) -> None:
    isolation = Isolation(level=level, cpus=CLUSTER_CPUS)
    found = await run_probes(partial(start_sandbox, backend), isolation)
    findings = [accept(each, backend.accepted_escapes) for each in found]
    assert [each for each in findings if each.verdict not in ("held", "accepted")] == []
    assert "public_networks" in {each.probe for each in findings if each.verdict == "accepted"}
    assert refusal_reason(findings) is None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_escape_attack_on_a_pod_is_held_or_accepted_unless_it_is_listed_as_open(
    attack: Attack, backend: KubernetesBackend, context: EscapeContext
) -> None:
    if attack.name in NEED_A_LIMIT_OF_PROCESSES and not await _nodes_limit_processes():
        pytest.skip("the kubelets have no podPidsLimit, so processes are not limited")
    open_here = OPEN if PROFILE else {**OPEN, **OPEN_WITHOUT_PROFILE}
    finding = accept(await run_attack(context, attack), backend.accepted_escapes)
    if attack.name in OPEN_SOMETIMES and finding.verdict == "open":
        return
    if attack.name in open_here:
        assert finding.verdict == "open", f"no longer true: {open_here[attack.name]}"
    else:
        assert finding.verdict in ("held", "accepted"), finding.detail


async def _nodes_limit_processes() -> bool:
    async with ClusterAdmin() as admin:
        nodes = (await admin.call("GET", "/api/v1/nodes"))["items"]
        names = [node["metadata"]["name"] for node in nodes]
        paths = [f"/api/v1/nodes/{name}/proxy/configz" for name in names]
        configs = [(await admin.call("GET", path))["kubeletconfig"] for path in paths]
    return all(0 < config.get("podPidsLimit", -1) < 512 for config in configs)
