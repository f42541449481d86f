"""A node is lost while a sandbox on it runs a command: the run goes on, in the same sandbox or in
another one, and the results of a lost sandbox are not accepted."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.system import (
    ANSWER,
    TIMEOUT_S,
    Servers,
    System,
    command_until_it_succeeds,
    running_system,
)
from tests.fakes.waiting import until
from tests.processes import running

pytestmark = pytest.mark.cluster


@contextmanager
def repaired(cluster: Cluster) -> Iterator[None]:
    """Put all nodes on the network, with power, at the end of the block."""
    try:
        yield
    finally:
        for node in cluster.nodes:
            cluster.power_on(node.name)
            cluster.heal(node.name)
            cluster.wait_for_node(node.name)


def require_one_accepted_sandbox(system: System, command: str) -> None:
    """Fail unless a command was executed once in each sandbox, in two at most, and only the result
    of the last one was accepted."""
    sandboxes = system.counter.sandboxes(command)
    assert len(sandboxes) <= 2
    assert system.accepted_sandboxes(command) == sandboxes[-1:]


async def test_run_survives_a_node_that_is_cut_off_for_less_than_the_lease(
    servers: Servers, tmp_path: Path
) -> None:
    cluster = servers.cluster
    script = command_until_it_succeeds("sleep 12")
    async with running_system(servers, tmp_path, script) as system:
        with repaired(cluster), anyio.fail_after(TIMEOUT_S):
            answer = system.ask("short")
            await system.counter.began("short")
            node = await system.node_of_the_sandbox()
            cluster.cut_off(node)
            await anyio.to_thread.run_sync(partial(cluster.wait_for_node, node, ready=False))
            cluster.heal(node)
            assert await answer == ANSWER
        require_one_accepted_sandbox(system, "short")
        assert len(system.counter.sandboxes("short")) == 1


async def test_run_gets_another_sandbox_if_its_node_is_cut_off_for_more_than_the_lease(
    servers: Servers, tmp_path: Path
) -> None:
    cluster = servers.cluster
    marker = "100000.198"
    async with running_system(
        servers, tmp_path, command_until_it_succeeds(f"sleep {marker}")
    ) as system:
        with repaired(cluster), anyio.fail_after(TIMEOUT_S):
            answer = system.ask("long")
            await system.counter.began("long")
            await until(lambda: running(marker))
            node = await system.node_of_the_sandbox()
            cluster.cut_off(node)
            await until(lambda: not running(marker))
            assert {each.name: each.connected for each in cluster.status().nodes}[node] is False
            assert await answer == ANSWER
        require_one_accepted_sandbox(system, "long")
        assert len(system.counter.sandboxes("long")) == 2


async def test_run_gets_another_sandbox_if_its_node_loses_its_power(
    servers: Servers, tmp_path: Path
) -> None:
    cluster = servers.cluster
    script = command_until_it_succeeds("sleep 12")
    async with running_system(servers, tmp_path, script) as system:
        with repaired(cluster), anyio.fail_after(TIMEOUT_S):
            answer = system.ask("power")
            await system.counter.began("power")
            await anyio.to_thread.run_sync(cluster.power_off, await system.node_of_the_sandbox())
            assert await answer == ANSWER
            require_one_accepted_sandbox(system, "power")
            assert len(system.counter.sandboxes("power")) == 2
