"""The Pods of sandboxes: isolation and limits in the terms of the Kubernetes API.

The guest agent is the Pod's main process. A sandbox image may hold the agent's program at
AGENT_PATH. For other images, an init container copies the program from the agent image to an empty
volume, which the sandbox sees read-only.

At the standard level a Pod meets the Pod Security Standard `baseline`, at the strict level
`restricted`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.isolation import Isolation
from sandbox_runtime.backends.limits import (
    guest_user,
    new_host_uid,
    rlimits,
    tmpfs_size_mib,
)
from sandbox_runtime.guest.agent import LIFETIME_S, GuestConfig

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
"""The capabilities that apt and pip need. Sandboxes have only these at the standard level, and none
at the strict level."""
CONTAINER = "sandbox"
"""The container whose main process is the guest agent."""
AGENT_DIR = "/.agent"
AGENT_PATH = f"{AGENT_DIR}/agent"
AGENT_IMAGE_PATH = "/agent"
"""The agent's program in the agent image, which also has /bin/cp."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "llm-sandbox-proxy"}
COMPONENT_LABEL = "app.kubernetes.io/component"
OWNER_LABEL = "llm-sandbox-proxy/owner"
LOG_MIB = 64
"""Disk space for the container's log on the node, which counts towards the Pod's disk. Everything
that the agent sends passes through the log; by default the kubelet keeps 50 MiB of it."""
DEADLINE_S = int(LIFETIME_S) + 60
"""The kubelet ends a Pod after this time, even without a connection to the API server. The agent
ends itself 60 s earlier."""
_STRICT_DISKS = {"/testbed": 1 / 2, "/tmp": 1 / 4, "/home": 1 / 8, "/run": 1 / 8}
"""The writable directories at the strict level, and each one's share of the disk."""
_AGENT_VOLUME_MIB = 16
_COPY_CPU, _COPY_MEMORY = "100m", "32Mi"
_MIN_CPU_MILLIS = 10
"""The lowest CPU limit, in thousandths of a core. The kernel's quota period cannot express less."""
_START = 'PATH="$HOME/.local/bin:$PATH" exec "$0"'
"""A shell command that starts the agent with the directory of `pip install --user` first in PATH.
Only a shell in the container knows the image's own PATH."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The settings of the Pods of a backend."""

    image: str
    agent_image: str | None = None
    """An image with the agent's program; None: the sandbox image holds it at AGENT_PATH."""
    runtime_class: str | None = None
    seccomp_profile: str | None = None
    """The path of a profile in the kubelet's seccomp directory; None: the runtime's default
    profile."""

    def sandbox_pod(self, name: str, owner: str, isolation: Isolation) -> dict[str, Any]:
        """Return a Pod that runs the guest agent."""
        user = guest_user(isolation)
        uid = new_host_uid() if isolation.level == "strict" else user.uid
        container = {
            "command": ["/bin/sh", "-c", _START, AGENT_PATH],
            "env": _env({"HOME": user.home, "USER": user.name}),
            # Not stdinOnce: the agent's input stays open when an attach call ends.
            "stdin": True,
        }
        pod = self._pod(name, owner, "sandbox", isolation, uid, container)
        if self.agent_image:
            self._add_agent_volume(pod, self.agent_image, uid, isolation)
        return pod

    def command_pod(
        self, name: str, owner: str, component: str, argv: Sequence[str], deadline_s: int
    ) -> dict[str, Any]:
        """Return a Pod that runs one command in the sandbox image, with the isolation of the strict
        level. Network policies select the Pod by its label for `component`."""
        isolation = Isolation(level="strict", memory_mib=64, cpus=0.1, disk_mib=16)
        container = {"command": list(argv), "env": _env({})}
        pod = self._pod(name, owner, component, isolation, new_host_uid(), container)
        pod["spec"]["activeDeadlineSeconds"] = deadline_s
        return pod

    def _pod(
        self,
        name: str,
        owner: str,
        component: str,
        isolation: Isolation,
        uid: int,
        container: Mapping[str, Any],
    ) -> dict[str, Any]:
        runtime = {"runtimeClassName": self.runtime_class} if self.runtime_class else {}
        disks = _strict_disk_sizes_mib(isolation) if isolation.level == "strict" else {}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**MANAGED_BY, COMPONENT_LABEL: component, OWNER_LABEL: owner},
            },
            "spec": {
                **runtime,
                "restartPolicy": "Never",
                "activeDeadlineSeconds": DEADLINE_S,
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "hostname": "sandbox",
                # No name server: lookups fail at once instead of waiting for denied packets.
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["127.0.0.1"]},
                "securityContext": {
                    "runAsUser": uid,
                    "runAsGroup": uid,
                    "seccompProfile": self._seccomp_profile(),
                },
                "containers": [
                    {
                        "name": CONTAINER,
                        "image": self.image,
                        "imagePullPolicy": "IfNotPresent",
                        "workingDir": "/",
                        "resources": _resources(isolation),
                        "securityContext": _security_context(isolation),
                        "volumeMounts": [
                            {"name": f"disk-{path.strip('/')}", "mountPath": path} for path in disks
                        ],
                        **container,
                    }
                ],
                "volumes": [
                    {
                        "name": f"disk-{path.strip('/')}",
                        "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mib}Mi"},
                    }
                    for path, size_mib in disks.items()
                ],
            },
        }

    def _seccomp_profile(self) -> dict[str, str]:
        if self.seccomp_profile:
            return {"type": "Localhost", "localhostProfile": self.seccomp_profile}
        return {"type": "RuntimeDefault"}

    def _add_agent_volume(
        self, pod: dict[str, Any], agent_image: str, uid: int, isolation: Isolation
    ) -> None:
        mount = {"name": "agent", "mountPath": AGENT_DIR}
        limits = {"cpu": _COPY_CPU, "memory": _COPY_MEMORY, "ephemeral-storage": f"{LOG_MIB}Mi"}
        spec = pod["spec"]
        spec["volumes"].append(
            {"name": "agent", "emptyDir": {"sizeLimit": f"{_AGENT_VOLUME_MIB}Mi"}}
        )
        spec["containers"][0]["volumeMounts"].append({**mount, "readOnly": True})
        spec["initContainers"] = [
            {
                "name": "agent",
                "image": agent_image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/cp", AGENT_IMAGE_PATH, AGENT_PATH],
                "resources": {"requests": limits, "limits": limits},
                "securityContext": {
                    **_unprivileged_context(uid != 0),
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [mount],
            }
        ]


def guest_config(isolation: Isolation, link_token: bytes, lease_s: float) -> GuestConfig:
    """Return the agent's configuration. The agent sets the rlimits, because a Pod cannot declare
    any."""
    limits = dict(rlimits(isolation))
    if isolation.level == "strict":
        # The kernel counts the processes of a host uid, and each sandbox has its own. Root is
        # exempt, so at the standard level only the kubelet's podPidsLimit holds.
        limits["nproc"] = isolation.pids
    config = GuestConfig()
    return GuestConfig(
        rlimits={f"RLIMIT_{name.upper()}": value for name, value in limits.items()},
        directories=(*config.directories, guest_user(isolation).home),
        watchdog_s=lease_s,
        link_token=link_token.hex(),
    )


def _env(values: Mapping[str, str]) -> list[dict[str, str]]:
    env = {"LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **values}
    return [{"name": name, "value": value} for name, value in env.items()]


def _resources(isolation: Isolation) -> dict[str, Any]:
    """Return limits and equal requests, so that the Pods on a node cannot use more than the node
    has."""
    limits = {
        "cpu": f"{max(_MIN_CPU_MILLIS, round(isolation.cpus * 1000))}m",
        "memory": f"{isolation.memory_mib}Mi",
        "ephemeral-storage": f"{isolation.disk_mib + LOG_MIB}Mi",
    }
    return {"requests": limits, "limits": limits}


def _security_context(isolation: Isolation) -> dict[str, Any]:
    strict = isolation.level == "strict"
    context = {**_unprivileged_context(strict), "readOnlyRootFilesystem": strict}
    if not strict:
        context["capabilities"] = {"drop": ["ALL"], "add": list(CAPABILITIES)}
    return context


def _unprivileged_context(non_root: bool) -> dict[str, Any]:
    return {
        "runAsNonRoot": non_root,
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
    }


def _strict_disk_sizes_mib(isolation: Isolation) -> dict[str, int]:
    """Return the writable directories at the strict level, and the size of each in MiB."""
    size_mib = tmpfs_size_mib(isolation)
    return {path: max(1, int(size_mib * share)) for path, share in _STRICT_DISKS.items()}
