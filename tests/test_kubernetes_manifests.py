"""The manifests of deploy/kubernetes: they are valid, agree with the backend and with each other,
and give nobody more than is needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import Config, parse
from sandbox_runtime.backends.kubernetes_check import CONTROL_COMPONENT, VERBS
from sandbox_runtime.backends.kubernetes_pod import COMPONENT_LABEL
from sandbox_runtime.backends.seccomp import docker_seccomp_profile, oci_seccomp_profile
from tests.kubernetes_models import validate

MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes"
FILES = sorted(path.name for path in MANIFESTS.glob("*.yaml"))


def documents(file: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((MANIFESTS / file).read_text(encoding="utf-8"))


def the(file: str, kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only object of a kind, or the one with a name."""
    (found,) = [
        each
        for each in documents(file)
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def proxy_config() -> Config:
    return parse(yaml.safe_load(the("proxy.yaml", "ConfigMap")["data"]["config.yaml"]), "manifest")


def test_seccomp_profile_is_that_of_the_docker_backend() -> None:
    shipped = (MANIFESTS / "seccomp.json").read_text(encoding="utf-8")
    assert shipped == oci_seccomp_profile() + "\n", "write it again: see oci_seccomp_profile"
    profile, docker = json.loads(shipped), json.loads(docker_seccomp_profile())
    assert profile["architectures"] == [each["architecture"] for each in docker.pop("archMap")]
    assert {**docker, "architectures": profile["architectures"]} == profile


def test_both_manifests_are_checked() -> None:
    assert FILES == ["proxy.yaml", "sandboxes.yaml"]


@pytest.mark.parametrize("file", FILES)
def test_manifests_have_only_fields_of_the_current_api(file: str) -> None:
    for document in documents(file):
        validate(document)


def test_every_object_of_the_sandboxes_is_in_the_namespace_of_the_configuration() -> None:
    namespace = proxy_config().sandbox.kubernetes.namespace
    assert namespace == Config().sandbox.kubernetes.namespace
    for document in documents("sandboxes.yaml"):
        metadata = document["metadata"]
        assert metadata.get("namespace", metadata["name"]) == namespace


def test_role_permits_exactly_what_the_backend_does() -> None:
    permitted = {
        (group, verb, *resource.partition("/")[::2])
        for rule in the("sandboxes.yaml", "Role")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert permitted == set(VERBS)


def test_role_is_bound_to_the_service_account_of_the_proxy_only() -> None:
    account = the("proxy.yaml", "ServiceAccount")["metadata"]
    binding = the("sandboxes.yaml", "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account}]
    assert binding["roleRef"]["name"] == the("sandboxes.yaml", "Role")["metadata"]["name"]
    pod = the("proxy.yaml", "Deployment")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["name"]


def test_no_manifest_grants_rights_in_the_whole_cluster() -> None:
    kinds = {document["kind"] for file in FILES for document in documents(file)}
    assert not {kind for kind in kinds if kind.startswith("Cluster")}


def test_network_policy_denies_everything_to_all_pods_but_those_of_the_check() -> None:
    denied = the("sandboxes.yaml", "NetworkPolicy", "deny-all")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    allowed = the("sandboxes.yaml", "NetworkPolicy", "allow-network-check")["spec"]
    assert allowed["podSelector"] == {"matchLabels": {COMPONENT_LABEL: CONTROL_COMPONENT}}
    assert allowed["policyTypes"] == ["Egress"]


def test_pool_of_the_manifest_fits_into_the_quota() -> None:
    pool = proxy_config().sandbox.pool
    quota = the("sandboxes.yaml", "ResourceQuota")["spec"]["hard"]
    isolation = proxy_config().isolation
    assert pool.max_sandboxes + 2 <= int(quota["pods"])  # the network check has two
    assert pool.max_sandboxes * isolation.cpus <= int(quota["limits.cpu"])
    memory_gib = int(quota["limits.memory"].removesuffix("Gi"))
    assert pool.max_sandboxes * isolation.memory_mib <= memory_gib * 1024


def test_proxy_pod_meets_the_pod_security_standard_restricted() -> None:
    labels = the("proxy.yaml", "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    spec = the("proxy.yaml", "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_disruption_budget_and_service_select_the_pods_of_the_deployment() -> None:
    deployment = the("proxy.yaml", "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert the("proxy.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("proxy.yaml", "Service")["spec"]["selector"] == labels


def test_data_directory_of_the_configuration_is_the_mounted_volume() -> None:
    (container,) = the("proxy.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(proxy_config().server.data_dir) == mounts["data"]
    named = {each["name"] for each in container["env"]}
    assert {proxy_config().keys[0].env, proxy_config().backend.api_key_env} == named
