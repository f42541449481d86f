"""Plays a network plugin that enforces the policies of deploy/kubernetes/sandboxes.yaml, with
packet filters in the nodes' network namespaces: the plugin of the test cluster enforces none."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from sandbox_runtime.backends.kubernetes_check import CONTROL_COMPONENT
from sandbox_runtime.backends.kubernetes_pod import COMPONENT_LABEL
from tests.sandbox_runtime.backends.cluster import ClusterAdmin

NAMESPACES_VARIABLE = "SANDBOX_TEST_NODE_NAMESPACES"
"""Names the network namespaces of the nodes, separated by commas, as `ip netns` does."""
PODS = "10.244.0.0/16"
CHAINS = ("FORWARD", "INPUT")
_POLL_S = 0.1


@asynccontextmanager
async def enforced_policies(admin: ClusterAdmin) -> AsyncIterator[None]:
    """Deny all packets of Pods, except those of the Pod that the policies permit everything. Skip
    the test if the nodes' network namespaces are not known."""
    if not (names := os.environ.get(NAMESPACES_VARIABLE)):
        pytest.skip(f"{NAMESPACES_VARIABLE} names no network namespaces of nodes")
    nodes = names.split(",")
    try:
        for node in nodes:
            for chain in CHAINS:
                await _filter(node, "-A", chain, "-s", PODS, "-j", "DROP")
        permitting = asyncio.create_task(_permit_controls(admin, nodes))
        try:
            yield
        finally:
            permitting.cancel()
            await asyncio.wait([permitting])
    finally:
        with anyio.CancelScope(shield=True):
            for node in nodes:
                for chain in CHAINS:
                    await _filter(node, "-F", chain)


async def _permit_controls(admin: ClusterAdmin, nodes: list[str]) -> None:
    """Permit the packets of each Pod of the network check, as soon as it has an address."""
    permitted = set()
    while True:
        for pod in await admin.pods():
            address = pod["status"].get("podIP")
            is_control = pod["metadata"]["labels"].get(COMPONENT_LABEL) == CONTROL_COMPONENT
            if address and is_control and address not in permitted:
                permitted.add(address)
                for node in nodes:
                    for chain in CHAINS:
                        await _filter(node, "-I", chain, "-s", address, "-j", "ACCEPT")
        await asyncio.sleep(_POLL_S)


async def _filter(node: str, *rule: str) -> None:
    await anyio.run_process(["ip", "netns", "exec", node, "iptables", "-w", *rule])
