"""The manifests of deploy/kubernetes and the chart of deploy/helm: they are valid, agree with the
backend and with each other, and give nobody more than is needed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import Config, parse
from sandbox_runtime.backends.kubernetes_check import CONTROL_COMPONENT, VERBS
from sandbox_runtime.backends.kubernetes_pod import COMPONENT_LABEL
from sandbox_runtime.backends.seccomp import docker_seccomp_profile, oci_seccomp_profile
from tests.helm.chart import ChartError, render
from tests.kubernetes_models import validate

MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes"
SEVERAL_REPLICAS = {
    "replicas": 3,
    "config": {
        "store": {
            "database_url": "postgresql://proxy@db.example.com/proxy",
            "blobs_url": "s3://sandbox-proxy/files",
        }
    },
}


class Manifests:
    """The objects that one way of installation creates."""

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self.objects = objects

    def the(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """Return the only object of a kind, or the one with a name."""
        (found,) = [
            each
            for each in self.objects
            if each["kind"] == kind and name in (None, each["metadata"]["name"])
        ]
        return found

    def proxy_config(self) -> Config:
        return parse(yaml.safe_load(self.the("ConfigMap")["data"]["config.yaml"]), "manifest")

    def pod(self) -> dict[str, Any]:
        """Return the spec of the proxy's Pods."""
        spec: dict[str, Any] = self.the("Deployment")["spec"]["template"]["spec"]
        return spec


@pytest.fixture(scope="module", params=["kubectl", "helm", "helm, several replicas"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    if request.param == "kubectl":
        files = [MANIFESTS / "sandboxes.yaml", MANIFESTS / "proxy.yaml"]
        texts = [file.read_text(encoding="utf-8") for file in files]
        return Manifests([each for text in texts for each in yaml.safe_load_all(text)])
    return Manifests(render(SEVERAL_REPLICAS if "several" in request.param else {}))


def test_seccomp_profile_is_that_of_the_docker_backend() -> None:
    shipped = (MANIFESTS / "seccomp.json").read_text(encoding="utf-8")
    assert shipped == oci_seccomp_profile() + "\n", "write it again: see oci_seccomp_profile"
    profile, docker = json.loads(shipped), json.loads(docker_seccomp_profile())
    assert profile["architectures"] == [each["architecture"] for each in docker.pop("archMap")]
    assert {**docker, "architectures": profile["architectures"]} == profile


def test_manifests_have_only_fields_of_the_current_api(manifests: Manifests) -> None:
    for document in manifests.objects:
        validate(document)


def test_sandboxes_are_in_a_namespace_of_their_own(manifests: Manifests) -> None:
    namespace = manifests.proxy_config().sandbox.kubernetes.namespace
    assert namespace == Config().sandbox.kubernetes.namespace
    for kind in ("ResourceQuota", "Role", "RoleBinding"):
        assert manifests.the(kind)["metadata"]["namespace"] == namespace
    for name in ("deny-all", "allow-network-check"):
        assert manifests.the("NetworkPolicy", name)["metadata"]["namespace"] == namespace
    labels = manifests.the("Namespace", namespace)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    assert manifests.the("Deployment")["metadata"]["namespace"] != namespace


def test_role_permits_exactly_what_the_backend_does(manifests: Manifests) -> None:
    permitted = {
        (group, verb, *resource.partition("/")[::2])
        for rule in manifests.the("Role")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert permitted == set(VERBS)


def test_role_is_bound_to_the_service_account_of_the_proxy_only(manifests: Manifests) -> None:
    account = manifests.the("ServiceAccount")["metadata"]
    binding = manifests.the("RoleBinding")
    (subject,) = binding["subjects"]
    assert subject["kind"] == "ServiceAccount"
    assert subject["name"] == account["name"] == manifests.pod()["serviceAccountName"]
    assert subject["namespace"] == account["namespace"]
    assert binding["roleRef"]["name"] == manifests.the("Role")["metadata"]["name"]


def test_no_manifest_grants_rights_in_the_whole_cluster(manifests: Manifests) -> None:
    kinds = {document["kind"] for document in manifests.objects}
    assert not {kind for kind in kinds if kind.startswith("Cluster")}


def test_network_policy_denies_all_traffic_except_egress_of_the_network_check_pods(
    manifests: Manifests,
) -> None:
    denied = manifests.the("NetworkPolicy", "deny-all")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    allowed = manifests.the("NetworkPolicy", "allow-network-check")["spec"]
    assert allowed["podSelector"] == {"matchLabels": {COMPONENT_LABEL: CONTROL_COMPONENT}}
    assert allowed["policyTypes"] == ["Egress"]


def test_sandbox_pool_of_one_replica_fits_into_the_resource_quota_of_the_namespace(
    manifests: Manifests,
) -> None:
    pool = manifests.proxy_config().sandbox.pool
    quota = manifests.the("ResourceQuota")["spec"]["hard"]
    isolation = manifests.proxy_config().isolation
    assert pool.max_sandboxes + 2 <= int(quota["pods"])  # the network check has two
    assert pool.max_sandboxes * isolation.cpus <= int(quota["limits.cpu"])
    memory_gib = int(quota["limits.memory"].removesuffix("Gi"))
    assert pool.max_sandboxes * isolation.memory_mib <= memory_gib * 1024


def test_proxy_pod_meets_the_pod_security_standard_restricted(manifests: Manifests) -> None:
    assert manifests.pod()["securityContext"]["runAsNonRoot"] is True
    assert manifests.pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = manifests.pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_disruption_budget_and_service_select_the_pods_of_the_deployment(
    manifests: Manifests,
) -> None:
    deployment = manifests.the("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert manifests.the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert manifests.the("Service")["spec"]["selector"] == labels


def test_data_directory_of_the_configuration_is_a_mounted_volume(manifests: Manifests) -> None:
    (container,) = manifests.pod()["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(manifests.proxy_config().server.data_dir) == mounts["data"]
    assert {each["name"] for each in manifests.pod()["volumes"]} == set(mounts)


def test_keys_of_the_configuration_come_from_the_secret(manifests: Manifests) -> None:
    config = manifests.proxy_config()
    assert (config.keys[0].env, config.backend.api_key_env) == ("SANDBOX_PROXY_KEY", "BACKEND_KEY")
    (container,) = manifests.pod()["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "sandbox-proxy"}}]


def test_termination_grace_period_of_the_proxy_pod_is_longer_than_its_drain_time(
    manifests: Manifests,
) -> None:
    drain_s = manifests.proxy_config().server.drain_s
    assert manifests.pod()["terminationGracePeriodSeconds"] >= drain_s + 30


def test_startup_and_liveness_probes_use_health_live_and_readiness_probe_health_ready(
    manifests: Manifests,
) -> None:
    (container,) = manifests.pod()["containers"]
    probes = {probe: container[probe]["httpGet"]["path"] for probe in container if "Probe" in probe}
    assert probes == {
        "startupProbe": "/health/live",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }


def test_single_replica_has_a_persistent_volume_and_several_replicas_have_a_database(
    manifests: Manifests,
) -> None:
    deployment = manifests.the("Deployment")["spec"]
    (data,) = [each for each in manifests.pod()["volumes"] if each["name"] == "data"]
    if deployment["replicas"] == 1:
        assert deployment["strategy"] == {"type": "Recreate"}
        assert data["persistentVolumeClaim"] == {
            "claimName": manifests.the("PersistentVolumeClaim")["metadata"]["name"]
        }
    else:
        assert deployment["strategy"] == {"type": "RollingUpdate"}
        assert "emptyDir" in data
        assert manifests.proxy_config().store.database_url


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replicas": 2}, "config.store.database_url"),
        ({"replicas": 0}, "replicas"),
        ({"replica": 2}, "replica is not allowed"),
        ({"sandboxes": {"runtime_class": "gvisor"}}, "runtime_class is not allowed"),
        ({"config": {"server": {"drain_s": "30s"}}}, "drain_s"),
    ],
)
def test_chart_refuses_values_that_would_not_work(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ChartError, match=problem):
        render(values)


def test_helm_values_of_the_user_are_merged_with_the_configuration_of_the_chart() -> None:
    values = {
        "sandboxes": {"runtimeClass": "gvisor"},
        "config": {
            "sandbox": {"kubernetes": {"start_timeout_s": 90}},
            "files": {"quota_mib": 20_000_000},
        },
    }
    config = Manifests(render(values)).proxy_config()
    assert config.sandbox.kubernetes.runtime_class == "gvisor"
    assert config.sandbox.kubernetes.start_timeout_s == 90
    assert config.sandbox.kubernetes.image.endswith("/sandbox:0.1.0")
    assert config.files.quota_mib == 20_000_000
    assert config.sandbox.pool.min_ready == 4
