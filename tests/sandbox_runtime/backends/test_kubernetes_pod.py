"""The Pods that the Kubernetes backend creates, without a cluster."""

from typing import Any

import pytest

from policies.isolation import Isolation, Level
from sandbox_runtime.backends.kubernetes_pod import (
    AGENT_PATH,
    DEADLINE_S,
    PodSpec,
    guest_config,
)
from sandbox_runtime.backends.limits import HOST_UIDS
from sandbox_runtime.guest.agent import LIFETIME_S
from sandbox_runtime.packets import TOKEN_BYTES
from tests.kubernetes_models import validate

SPEC = PodSpec("registry.example.com/sandbox:1", "registry.example.com/agent:1", "gvisor")
LEVELS: list[Level] = ["standard", "strict"]
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
"""The capabilities that the Pod Security Standard `baseline` permits to add."""
TOKEN = bytes(TOKEN_BYTES)


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    spec = pod["spec"]
    return [*spec["containers"], *spec.get("initContainers", [])]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("agent_image", [None, "agent:1"])
def test_pod_has_only_fields_of_the_current_api(level: Level, agent_image: str | None) -> None:
    validate(PodSpec("sandbox:1", agent_image).sandbox_pod("s-1", "owner", Isolation(level=level)))


def test_network_check_pod_has_only_fields_of_the_current_api() -> None:
    validate(SPEC.command_pod("check-1", "owner", "network-check", ["true"], 60))


@pytest.mark.parametrize("level", LEVELS)
def test_pod_meets_the_pod_security_standard_baseline(level: Level) -> None:
    pod = SPEC.sandbox_pod("s-1", "owner", Isolation(level=level))
    spec = pod["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
    assert all(set(volume) == {"name", "emptyDir"} for volume in spec["volumes"])
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers_of(pod):
        context = container["securityContext"]
        assert context["privileged"] is False
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"].get("add", [])) <= BASELINE_CAPABILITIES
        assert not {"ports", "volumeDevices", "lifecycle"} & set(container)


def test_strict_pod_meets_the_pod_security_standard_restricted() -> None:
    pod = SPEC.sandbox_pod("s-1", "owner", Isolation(level="strict"))
    assert pod["spec"]["securityContext"]["runAsUser"] in HOST_UIDS
    for container in containers_of(pod):
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert "add" not in context["capabilities"]


def test_strict_sandbox_pods_run_as_different_uids() -> None:
    pods = [SPEC.sandbox_pod(f"s-{n}", "owner", Isolation(level="strict")) for n in range(8)]
    assert len({pod["spec"]["securityContext"]["runAsUser"] for pod in pods}) == 8


def test_pod_has_no_credentials_no_service_variables_and_no_name_server() -> None:
    spec = SPEC.sandbox_pod("s-1", "owner", Isolation())["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    assert spec["runtimeClassName"] == "gvisor"


def test_resource_requests_of_a_pod_equal_its_limits() -> None:
    pod = SPEC.sandbox_pod("s-1", "owner", Isolation(memory_mib=512, cpus=0.25, disk_mib=100))
    for container in containers_of(pod):
        assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "250m",
        "memory": "512Mi",
        "ephemeral-storage": "164Mi",  # 64 MiB are for the container's log
    }


def test_deadline_of_a_pod_is_later_than_the_lifetime_of_its_agent() -> None:
    spec = SPEC.sandbox_pod("s-1", "owner", Isolation())["spec"]
    assert spec["activeDeadlineSeconds"] == DEADLINE_S > LIFETIME_S
    assert spec["restartPolicy"] == "Never"


def test_agent_is_copied_from_its_image_to_a_volume_that_is_read_only_in_the_sandbox() -> None:
    spec = SPEC.sandbox_pod("s-1", "owner", Isolation())["spec"]
    (copying,) = spec["initContainers"]
    assert copying["image"] == "registry.example.com/agent:1"
    assert copying["command"][-1] == AGENT_PATH
    mounts = {each["mountPath"]: each for each in spec["containers"][0]["volumeMounts"]}
    assert mounts["/.agent"]["readOnly"] is True


def test_image_with_the_agent_needs_no_init_container() -> None:
    spec = PodSpec("sandbox:1").sandbox_pod("s-1", "owner", Isolation())["spec"]
    assert "initContainers" not in spec
    assert spec["volumes"] == []
    assert spec["containers"][0]["command"][-1] == AGENT_PATH


def test_volumes_of_a_strict_pod_are_in_memory_with_sizes_that_fit_its_memory_limit() -> None:
    pod = SPEC.sandbox_pod(
        "s-1", "owner", Isolation(level="strict", memory_mib=1024, disk_mib=4096)
    )
    disks = [each["emptyDir"] for each in pod["spec"]["volumes"] if each["name"] != "agent"]
    assert {disk["medium"] for disk in disks} == {"Memory"}
    assert [disk["sizeLimit"] for disk in disks] == ["384Mi", "192Mi", "96Mi", "96Mi"]


def test_agent_limits_the_processes_of_a_strict_sandbox() -> None:
    strict = guest_config(Isolation(level="strict", pids=99), TOKEN, 30.0)
    assert strict.rlimits["RLIMIT_NPROC"] == 99
    standard = guest_config(Isolation(), TOKEN, 30.0)
    assert "RLIMIT_NPROC" not in standard.rlimits  # root is exempt from it
