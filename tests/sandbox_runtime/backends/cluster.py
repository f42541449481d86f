"""The Kubernetes cluster of the tests, and backends that run sandboxes in it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client, config

from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_pod import PodSpec

KUBECONFIG_VARIABLE = "SANDBOX_TEST_KUBECONFIG"
"""Names the kubeconfig file of a cluster whose nodes have TEST_IMAGE and AGENT_IMAGE."""
TEST_IMAGE = os.environ.get("SANDBOX_TEST_IMAGE", "llm-sandbox-proxy/test:latest")
AGENT_IMAGE = os.environ.get("SANDBOX_TEST_AGENT_IMAGE", "llm-sandbox-proxy/agent:latest") or None
"""None if the variable is empty: TEST_IMAGE holds the agent, and Pods start in half the time."""
NAMESPACE = "llm-sandboxes"
MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes"
_APPLY = "application/apply-patch+yaml"


def kubeconfig() -> Path:
    """Return the kubeconfig of the test cluster. Without one, skip the test, or fail with
    REQUIRE_CLUSTER."""
    if path := os.environ.get(KUBECONFIG_VARIABLE):
        return Path(path)
    reason = f"{KUBECONFIG_VARIABLE} names no kubeconfig of a test cluster"
    if os.environ.get("REQUIRE_CLUSTER"):
        pytest.fail(reason)
    pytest.skip(reason)


def kubernetes_backend(spec: PodSpec | None = None, **settings: Any) -> KubernetesBackend:
    """Return a backend on the test cluster, whose network plugin enforces no network policy."""
    return KubernetesBackend(
        spec or PodSpec(TEST_IMAGE, AGENT_IMAGE),
        **{
            "namespace": NAMESPACE,
            "kubeconfig": kubeconfig(),
            "allow_unenforced_network_policy": True,
            **settings,
        },
    )


class ClusterAdmin:
    """Changes the cluster as an operator does with kubectl: that of a kubeconfig file, or the test
    cluster."""

    def __init__(self, file: Path | None = None) -> None:
        self._kubeconfig = file or kubeconfig()
        self._configuration = client.Configuration()
        self._api: Any = None

    async def __aenter__(self) -> "ClusterAdmin":
        await config.load_kube_config(
            str(self._kubeconfig), client_configuration=self._configuration
        )
        self._api = client.ApiClient(self._configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def apply(self, manifest: str, namespace: str = NAMESPACE) -> None:
        """Apply the objects of a manifest of deploy/kubernetes, in another namespace if named."""
        for document in yaml.safe_load_all((MANIFESTS / manifest).read_text(encoding="utf-8")):
            await self.apply_object(_moved(document, namespace))

    async def apply_object(self, document: Mapping[str, Any]) -> None:
        """Create or change one object."""
        await self._call("PATCH", _path(document), document, {"fieldManager": "tests"}, _APPLY)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request and return the object of the response."""
        return await self._call(method, path, body, {}, "application/json")

    async def patch(self, path: str, changes: Mapping[str, Any]) -> None:
        """Change fields of an object."""
        await self._call("PATCH", path, changes, {}, "application/merge-patch+json")

    async def pods(self, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Return the Pods of a namespace."""
        found = await self.call("GET", f"/api/v1/namespaces/{namespace}/pods")
        return list(found["items"])

    async def _call(
        self, method: str, path: str, body: Any, query: Mapping[str, str], content_type: str
    ) -> Any:
        return await self._api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            response_types_map={200: "object", 201: "object", 202: "object"},
            _return_http_data_only=True,
        )


def _moved(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return an object of the sandboxes' namespace as one of another namespace."""
    metadata = document["metadata"]
    if document["kind"] == "Namespace" and metadata["name"] == NAMESPACE:
        return {**document, "metadata": {**metadata, "name": namespace}}
    if metadata.get("namespace") == NAMESPACE:
        return {**document, "metadata": {**metadata, "namespace": namespace}}
    return document


def _path(document: Mapping[str, Any]) -> str:
    """Return the path of an object in the API."""
    version, kind = document["apiVersion"], document["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = document["metadata"].get("namespace")
    inside = f"/namespaces/{namespace}" if namespace else ""
    plural = "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"
    return f"{root}{inside}/{plural}/{document['metadata']['name']}"
