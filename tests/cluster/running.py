"""A cluster for the tests of one process."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.processes import ClusterError
from tests.engines.installation import NotInstalledError

TEST_IMAGE = os.environ.get("SANDBOX_TEST_IMAGE", "llm-sandbox-proxy/test:latest")
AGENT_IMAGE = os.environ.get("SANDBOX_TEST_AGENT_IMAGE", "llm-sandbox-proxy/agent:latest")


@contextmanager
def running_cluster(images: Sequence[str], nodes: int = 3) -> Iterator[Cluster]:
    """Yield a cluster with Docker's images, and take it down afterwards.

    If TEST_CLUSTER names a cluster, use that one and leave it up.
    """
    given = os.environ.get("TEST_CLUSTER")
    cluster = cluster_or_skip(given or f"test{os.environ.get('PYTEST_XDIST_WORKER', '')}")
    try:
        cluster.up(nodes, images)
        yield cluster
    finally:
        if not given:
            cluster.down()


def cluster_or_skip(name: str) -> Cluster:
    """Return a cluster, which may not be up. Without root, Docker or an installation, skip the
    test, or fail if REQUIRE_CLUSTER is set.
    """
    try:
        if not shutil.which("docker"):
            raise ClusterError("no Docker: a cluster's images come from it")
        return Cluster(name)
    except (ClusterError, NotInstalledError) as error:
        if os.environ.get("REQUIRE_CLUSTER"):
            pytest.fail(str(error))
        pytest.skip(str(error))
