"""A service that the replicas need is lost, full, or lacks something: clients get their answers
later, or an error that tells them to repeat the request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from openai import InternalServerError

from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import COMPONENTS
from tests.cluster.processes import run as run_command
from tests.cluster.running import TEST_IMAGE
from tests.cluster.system import (
    ANSWER,
    TIMEOUT_S,
    Servers,
    System,
    command_until_it_succeeds,
    running_system,
)
from tests.fakes.waiting import until

pytestmark = pytest.mark.cluster

VANISHING_IMAGE = "localhost/vanishing:1"


def start_control_plane(cluster: Cluster) -> None:
    for component in COMPONENTS:
        cluster.start(component)


@pytest.mark.parametrize("killed", [("etcd",), ("api-server",), ("api-server", "etcd")])
async def test_runs_survive_the_death_of_the_api_server_and_etcd(
    servers: Servers, tmp_path: Path, killed: Sequence[str]
) -> None:
    cluster = servers.cluster
    script = command_until_it_succeeds("sleep 5")
    async with running_system(servers, tmp_path, script) as system:
        try:
            with anyio.fail_after(TIMEOUT_S):
                begun = system.ask("begun")
                await system.counter.began("begun")
                for component in killed:
                    cluster.kill(component)
                later = system.ask("later")
                await anyio.to_thread.run_sync(start_control_plane, cluster)
                assert [await begun, await later] == [ANSWER, ANSWER]
        finally:
            start_control_plane(cluster)
        sandboxes = system.counter.sandboxes("begun")
        assert len(sandboxes) == 1
        assert system.accepted_sandboxes("begun") == sandboxes
        assert len(system.counter.sandboxes("later")) == 1


async def test_runs_are_answered_once_although_the_database_was_killed(
    servers: Servers, tmp_path: Path
) -> None:
    script = command_until_it_succeeds("sleep 5")
    async with running_system(servers, tmp_path, script) as system:
        with anyio.fail_after(TIMEOUT_S):
            begun = system.ask("begun")
            await system.counter.began("begun")
            servers.database.stop()
            try:
                later = system.ask("later")
                await until(lambda: bool(system.refusals))  # a run needs the database to begin
            finally:
                servers.database.start()
            assert [await begun, await later] == [ANSWER, ANSWER]
            again = await system.ask("begun")
        assert again == ANSWER
        assert {each.json()["error"]["code"] for each in system.refusals} == {"store_unavailable"}
        assert len(system.counter.sandboxes("begun")) == 1
        assert len(system.counter.sandboxes("later")) == 1


async def test_request_beyond_the_quota_of_pods_is_refused_and_its_retry_answered(
    servers: Servers, tmp_path: Path
) -> None:
    async with running_system(servers, tmp_path, command_until_it_succeeds("sleep 10")) as system:
        await limit_pods(system, 1)
        with anyio.fail_after(TIMEOUT_S):
            first = system.ask("first")
            await system.counter.began("first")
            second = system.ask("second")
            assert [await first, await second] == [ANSWER, ANSWER]
        assert {each.status_code for each in system.refusals} == {503}
        assert len(system.counter.sandboxes("second")) == 1


async def limit_pods(system: System, count: int) -> None:
    """Limit the Pods of the namespace, and wait until the limit holds."""
    name = {"name": "limit", "namespace": system.namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": name}
    await system.admin.apply_object({**quota, "spec": {"hard": {"pods": str(count)}}})
    path = f"/api/v1/namespaces/{system.namespace}/resourcequotas/limit"
    with anyio.fail_after(TIMEOUT_S):
        while (await system.admin.call("GET", path))["status"].get("used") != {"pods": "0"}:
            pass


async def test_missing_image_is_a_503_until_it_is_loaded_again(
    servers: Servers, tmp_path: Path
) -> None:
    cluster = servers.cluster
    run_command("docker", "tag", TEST_IMAGE, VANISHING_IMAGE)
    cluster.load_image(VANISHING_IMAGE)
    script = command_until_it_succeeds("true")
    async with running_system(servers, tmp_path, script, image=VANISHING_IMAGE) as system:
        cluster.remove_image(VANISHING_IMAGE)
        with anyio.fail_after(TIMEOUT_S):
            with pytest.raises(InternalServerError) as refused:
                await system.client.with_options(max_retries=0).chat.completions.create(
                    model="fake-model", messages=[{"role": "user", "content": "missing"}]
                )
            error: Any = refused.value.body
            assert (refused.value.status_code, error["code"]) == (503, "sandbox_unavailable")
            assert VANISHING_IMAGE in error["message"]
            await anyio.to_thread.run_sync(cluster.load_image, VANISHING_IMAGE)
            assert await system.ask("missing") == ANSWER
        assert len(system.counter.sandboxes("missing")) == 1
    cluster.remove_image(VANISHING_IMAGE)
    run_command("docker", "rmi", VANISHING_IMAGE)
