"""Fixtures for tests on a real cluster: the cluster itself, and a client of its API server."""

from collections.abc import AsyncIterator, Iterator

import pytest
from kubernetes_asyncio import client, config

from tests.cluster.cluster import Cluster
from tests.cluster.running import AGENT_IMAGE, TEST_IMAGE, running_cluster
from tests.cluster.system import Servers
from tests.postgresql import server_for_tests
from tests.s3.server import running_s3_server


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes, each of which has the images of a sandbox."""
    with running_cluster([TEST_IMAGE, AGENT_IMAGE]) as running:
        yield running


@pytest.fixture
async def core(cluster: Cluster) -> AsyncIterator[client.CoreV1Api]:
    """The core API, with full rights. Its Pods are deleted afterwards."""
    configuration = client.Configuration()
    await config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        pods = client.CoreV1Api(api)
        yield pods
        await pods.delete_collection_namespaced_pod("default", grace_period_seconds=0)


@pytest.fixture(scope="session")
def servers(cluster: Cluster) -> Iterator[Servers]:
    """The cluster, a PostgreSQL server and an S3 server, for the tests of the whole system."""
    with server_for_tests() as database, running_s3_server() as s3:
        yield Servers(cluster, database, s3)
